"""Ending the pages of weights that were left.

Promise: what is left is bumped, by compare-and-set from the generation that this process was bound
to and with a token that all ranks and servers have for one update, so that it ends one generation
however many of them take part and in whatever order; what was left before that is deleted. What the
daemon did not take is remembered, and tried again by `settle`; until then `owes` says that old
pages may still be there. What the daemon answers, or not, raises nothing here.

Usable from any thread; calls wait for each other.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import kvtier
from kvtier import Layout
from kvtier.client import Connection

__all__ = ["Leaving", "Left"]

log = logging.getLogger(__name__)

#: Families that are remembered while the daemon does not answer, those of some thirty updates.
_OWED_MAX: Final = 64
_TOKEN_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """One family that is not used any more. `generation` is what this process was bound to last,
    `first_generation` at first: others may have bumped it meanwhile, for the same update. None
    where the daemon was never there.
    """

    layout: Layout
    first_generation: int | None
    generation: int | None

    def token(self, to_revision: str) -> bytes:
        """Names the update that left it."""
        if self.first_generation is None:
            return os.urandom(_TOKEN_BYTES)
        words = f"left at {self.first_generation} for {to_revision}"
        return hashlib.sha256(words.encode()).digest()[:_TOKEN_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bump:
    left: Left
    token: bytes


class Leaving:
    """For the namespaces of `tenant` and `salt`."""

    def __init__(self, connection: Connection, *, tenant: str, salt: bytes) -> None:
        self._connection = connection
        self._tenant = tenant
        self._salt = salt
        self._settling = threading.Lock()
        self._bumps: list[_Bump] = []
        self._deletes: list[Layout] = []
        #: Bumped, and deleted once the next ones are left.
        self._before: list[Layout] = []

    @property
    def is_settled(self) -> bool:
        return not (self._bumps or self._deletes)

    def owes(self, layouts: Sequence[Layout]) -> bool:
        """Whether one of them still has pages that were to be ended."""
        return any(owed.left.layout in layouts for owed in self._bumps)

    def leave(self, families: Sequence[Left], *, to_revision: str, deadline: float) -> None:
        """Weights called `to_revision` take the place of those of `families`."""
        with self._settling:
            self._bumps += [_Bump(left=left, token=left.token(to_revision)) for left in families]
            # What it goes back to is in use again; it was bumped when it was left.
            self._deletes = [
                layout
                for layout in (*self._deletes, *self._before)
                if layout.weights_revision != to_revision
            ]
            self._before = [left.layout for left in families]
            self._settle(deadline)
            if not self.is_settled:
                log.warning(
                    "kvtier: the daemon has not ended %d families of weights before yet",
                    len(self._bumps) + len(self._deletes),
                )
            if len(self._bumps) > _OWED_MAX:
                # The newest are the likeliest to be asked for again.
                log.warning("kvtier: pages of weights long gone stay until they are evicted")
            del self._bumps[:-_OWED_MAX], self._deletes[:-_OWED_MAX]

    def settle(self, deadline: float) -> None:
        """Tries again what is owed, unless somebody is at it."""
        if self.is_settled or not self._settling.acquire(blocking=False):
            return
        try:
            self._settle(deadline)
        finally:
            self._settling.release()

    def _settle(self, seconds: float) -> None:
        """Bumps first: they end pages, and deleting only makes room."""
        until = time.monotonic() + seconds
        self._bumps = [owed for owed in self._bumps if not self._bumped(owed, until)]
        self._deletes = [layout for layout in self._deletes if not self._deleted(layout, until)]

    def _bumped(self, owed: _Bump, until: float) -> bool:
        now = time.monotonic()
        if now >= until:
            return False
        try:
            # Conflict: somebody ended that generation. Unknown: nobody has opened it, or it was
            # deleted.
            with suppress(kvtier.UnknownNamespace, kvtier.GenerationConflict):
                self._connection.bump_namespace(
                    owed.left.layout,
                    tenant=self._tenant,
                    salt=self._salt,
                    expected=owed.left.generation,
                    token=owed.token,
                    deadline=until - now,
                )
        except kvtier.KvtierError as error:
            log.debug("kvtier: not bumped yet: %s", str(error))
            return False
        return True

    def _deleted(self, layout: Layout, until: float) -> bool:
        now = time.monotonic()
        if now >= until:
            return False
        try:
            with suppress(kvtier.UnknownNamespace):  # another rank was quicker
                self._connection.delete_namespace(
                    layout, tenant=self._tenant, salt=self._salt, deadline=until - now
                )
        except kvtier.KvtierError as error:
            log.debug("kvtier: not deleted yet: %s", str(error))
            return False
        return True
