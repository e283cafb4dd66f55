"""Pages of one host pool, to and from a kvtier daemon.

Promise: every method answers within its deadline, for each key; a page counts as there when each of
its objects is, and as got when each was verified where it now lies in the pool. What a get does not
report may hold anything. When a method has returned, nothing reads or writes the pool any more.
Between `pause` and `resume` everything is a miss, and what a call that began before the pause still
stores belongs to the weights before.

The copies are made by the calling thread where the daemon's memory is shared, else by the
connection's; either way the client waits for its own writes. A daemon that has gone silent is asked
again once a second at most (the connection sees to that), and the rest are misses at once.

SGLang calls from three threads, one each for exists, get and set; any thread may.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import kvtier
from kvtier import Layout
from kvtier.client import Connection, Namespace
from kvtier_sglang.layouts import PartLayout
from kvtier_sglang.meters import Meter
from kvtier_sglang.options import Options

if TYPE_CHECKING:
    import torch

__all__ = ["PageStore"]

log = logging.getLogger(__name__)

_REOPEN_S: Final = 1.0
#: Moved of one part before the next part's turn.
_RUN_BYTES: Final = 64 << 20
_LOOKUP_FIRST: Final = 256
_LOOKUP_MAX: Final = 8192
#: A flat page's memory is cut into objects in the order of the parts.
_Memory = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One object of each page: where it goes by name, and its place in the pool."""

    namespace: Namespace
    rows: torch.Tensor


class _Budget:
    """The seconds that a method has, over all its calls."""

    def __init__(self, seconds: float) -> None:
        self.began = time.monotonic()
        self._ends = self.began + seconds

    @property
    def left(self) -> float:
        return self._ends - time.monotonic()

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began


class PageStore:
    """`rows` are the pool's buffers, one for each of `parts`, with the pages first."""

    def __init__(
        self,
        connection: Connection,
        parts: Sequence[PartLayout],
        rows: Sequence[torch.Tensor],
        options: Options,
    ) -> None:
        """Opens the namespaces if the daemon is there. Raises LayoutError, NamespaceMismatch."""
        self._connection = connection
        self._options = options
        self._salt = options.salt.encode()
        self._layouts = [part.layout for part in parts]
        self._rows = [rows[part.buffer] for part in parts]
        self._reopening = threading.Lock()
        self._reopens_at = 0.0
        self._is_refused = False
        #: Of the weights before those before: nobody who is up to date has them any more.
        self._left: list[Layout] = []
        #: None while paused. A call looks once, and goes on with what it saw.
        self._parts: list[_Part] | None = self._opened(options.get_deadline)
        self.page_bytes = sum(layout.raw_bytes for layout in self._layouts)
        self.got = Meter()
        self.put = Meter()

    def exists(self, hashes: Sequence[str]) -> int:
        """How many pages from the first on are there now.

        SGLang asks for all pages of a prompt at once, 16,384 for a million tokens, and a run ends
        early more often than not: so a few are looked up first, then ever more.
        """
        budget = _Budget(self._options.exists_deadline)
        parts: Sequence[_Part] = self._parts or ()
        done, step = 0, _LOOKUP_FIRST
        while done < len(hashes) and self._is_open(parts):
            some = parts[0].namespace.keys_from(hashes[done : done + step])
            count = len(some)
            for part in parts:
                if not count or budget.left <= 0:
                    return done
                count = part.namespace.lookup(some[:count], deadline=budget.left).prefix
            done += count
            if count < len(some):
                break
            step = min(4 * step, _LOOKUP_MAX)
        return done

    def get(self, hashes: Sequence[str], places: Sequence[int]) -> list[bool]:
        """Pages to these places of the pool. After the first miss everything counts as one."""
        return self._get(hashes, [(rows, places) for rows in self._rows])

    def get_flat(self, hashes: Sequence[str], targets: Sequence[_Memory]) -> list[bool]:
        """Pages to memory outside the pool, one flat tensor each."""
        return self._get(hashes, [(rows, None) for rows in self._cut(targets)])

    def set(
        self, hashes: Sequence[str], places: Sequence[int], before: Sequence[str] = ()
    ) -> list[bool]:
        """Stores pages from these places of the pool. `before` are the hashes of the prompt's pages
        before the first. After the first page that is not stored nothing is.
        """
        return self._set(hashes, [(rows, places) for rows in self._rows], before)

    def set_flat(self, hashes: Sequence[str], sources: Sequence[_Memory]) -> list[bool]:
        """Stores pages from memory outside the pool, one flat tensor each."""
        return self._set(hashes, [(rows, None) for rows in self._cut(sources)], ())

    def clear(self) -> None:
        """Deletes every page of this family, of all ranks and servers. Raises when the daemon does
        not answer.
        """
        for layout in self._layouts:
            self._delete(layout, self._options.set_deadline)
        for part in self._parts or ():
            part.namespace.reopen(deadline=self._options.set_deadline)

    def pause(self) -> None:
        """Everything is a miss, and nothing is stored, until `resume`."""
        self._parts = None

    def resume(self, weights_revision: str) -> None:
        """Goes on with the pages of these weights. If they are others than before, the pages of
        those before are ended, of all ranks and servers: whoever still has those weights stores
        them anew. Where the daemon does not answer they stay; their family names their weights.

        Raises LayoutError, NamespaceMismatch; then it stays paused.
        """
        budget = _Budget(self._options.set_deadline)
        if weights_revision != self._layouts[0].weights_revision:
            self.pause()
            self._leave(budget)
            self._layouts = [
                replace(layout, weights_revision=weights_revision) for layout in self._layouts
            ]
        if self._parts is None:
            self._parts = self._opened(max(budget.left, self._options.exists_deadline))
            self._is_refused = False

    def _leave(self, budget: _Budget) -> None:
        """Bumps the present namespaces; deletes those left before, so that a server whose weights
        are updated all the time leaves two families in the daemon and not thousands.
        """
        try:
            for layout in self._left:
                self._delete(layout, budget.left)
            for layout in self._layouts:
                with suppress(kvtier.UnknownNamespace, kvtier.GenerationConflict):
                    self._connection.bump_namespace(
                        layout, tenant=self._options.tenant, salt=self._salt, deadline=budget.left
                    )
        except (kvtier.KvtierError, ValueError) as error:
            log.warning("kvtier: pages of the weights before stay until evicted: %s", str(error))
        self._left = self._layouts

    def _delete(self, layout: Layout, deadline: float) -> None:
        # Unknown: nobody has opened it, or another rank was quicker.
        with suppress(kvtier.UnknownNamespace):
            self._connection.delete_namespace(
                layout, tenant=self._options.tenant, salt=self._salt, deadline=deadline
            )

    def _opened(self, deadline: float) -> list[_Part]:
        return [
            _Part(
                namespace=self._connection.namespace(
                    layout, tenant=self._options.tenant, salt=self._salt, deadline=deadline
                ),
                rows=rows,
            )
            for layout, rows in zip(self._layouts, self._rows, strict=True)
        ]

    def _get(
        self, hashes: Sequence[str], memory: Sequence[tuple[_Memory, Sequence[int] | None]]
    ) -> list[bool]:
        budget = _Budget(self._options.get_deadline)
        if not (parts := self._parts or ()):
            return [False] * len(hashes)
        keys = parts[0].namespace.keys_from(hashes)

        def ask(number: int, begin: int, end: int) -> int:
            rows, places = memory[number]
            return (
                parts[number]
                .namespace.get(
                    keys[begin:end],
                    out=rows if places is not None else rows[begin:end],
                    at=None if places is None else places[begin:end],
                    deadline=budget.left,
                )
                .prefix
            )

        count = self._in_runs(parts, len(keys), budget, ask)
        self.got.add(count, count * self.page_bytes, budget.spent)
        return [True] * count + [False] * (len(keys) - count)

    def _set(
        self,
        hashes: Sequence[str],
        memory: Sequence[tuple[_Memory, Sequence[int] | None]],
        before: Sequence[str],
    ) -> list[bool]:
        budget = _Budget(self._options.set_deadline)
        if not (parts := self._parts or ()):
            return [False] * len(hashes)
        keys = parts[0].namespace.keys_from(hashes)
        last_before = next(iter(parts[0].namespace.keys_from(before[-1:])), None)

        def ask(number: int, begin: int, end: int) -> int:
            rows, places = memory[number]
            return (
                parts[number]
                .namespace.put(
                    keys[begin:end],
                    rows if places is not None else rows[begin:end],
                    at=None if places is None else places[begin:end],
                    parent=keys[begin - 1] if begin else last_before,
                    depth=len(before) + begin,
                    deadline=budget.left,
                )
                .prefix
            )

        count = self._in_runs(parts, len(keys), budget, ask)
        self.put.add(count, count * self.page_bytes, budget.spent)
        return [True] * count + [False] * (len(keys) - count)

    def _in_runs(
        self,
        parts: Sequence[_Part],
        total: int,
        budget: _Budget,
        ask: Callable[[int, int, int], int],
    ) -> int:
        """How many pages from the first on all parts have or took; `ask` is for a part and a range
        of pages, and says how many from the range's first on.

        Run by run, so that what was moved when the time is up is whole pages.
        """
        step = max(1, _RUN_BYTES // self.page_bytes)
        done = 0
        while done < total and self._is_open(parts):
            end = whole = min(done + step, total)
            for number in range(len(parts)):
                if end == done or budget.left <= 0:
                    return done
                end = done + ask(number, done, end)
            done = end
            if end < whole:
                break
        return done

    def _cut(self, pages: Sequence[_Memory]) -> list[list[_Memory]]:
        """The objects of flat pages: for each part a list with its piece of every page."""
        pieces: list[list[_Memory]] = []
        begin = 0
        for layout, rows in zip(self._layouts, self._rows, strict=True):
            length = layout.raw_bytes // rows.element_size()
            pieces.append([page[begin : begin + length] for page in pages])
            begin += length
        return pieces

    def _is_open(self, parts: Sequence[_Part]) -> bool:
        """Whether asking `parts` makes sense. After somebody bumped or deleted a namespace, binds
        to the present generation.

        The family names the weights: if the daemon has others for it now, opening it is refused,
        and everything stays a miss.
        """
        if not parts or parts is not self._parts:
            return False
        if not self._is_refused and not any(part.namespace.is_stale for part in parts):
            return True
        with self._reopening:
            if time.monotonic() < self._reopens_at:
                return not self._is_refused
            self._reopens_at = time.monotonic() + _REOPEN_S
            try:
                for part in parts:
                    part.namespace.reopen(deadline=self._options.exists_deadline)
            except kvtier.KvtierError as error:
                # Also when the daemon only did not answer: a namespace that is released and not
                # bound would be opened by the next call, which raises if it is refused then.
                if not self._is_refused:
                    log.warning("kvtier: all pages are misses: %s (%s)", str(error), error.remedy)
                self._is_refused = True
            else:
                self._is_refused = False
        return not self._is_refused
