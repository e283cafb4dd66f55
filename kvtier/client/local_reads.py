"""Lookups and gets by the shared directory: no round trip, no other thread.

What can be answered here is answered here: misses, and raw pages of host memory. All else is left
to the daemon: pages of lower tiers and packed ones, keys in doubt, copies that failed their sum, an
ended namespace. A lookup or get that begins after a bump, delete or condemn was answered finds
nothing of it, because the directory changes before the answer.

Any thread, several at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from kvtier.client.keys import joined_keys
from kvtier.client.local_get import LocalGet
from kvtier.client.local_link import LocalLink
from kvtier.client.reading import GetOptions, Reader
from kvtier.core.page import KEY_BYTES, GetCode
from kvtier.errors import ClientClosed
from kvtier.packing.layout import Layout
from kvtier.transfer.local.protocol import ANSWER_KEYS_MAX, DOUBT, HIT, MISS, Found
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import LookupReply, OpenedNamespace

__all__ = ["LocalCounts", "LocalReads"]

_IN_DOUBT = 0
#: What the directory's outcomes are to callers.
_ANSWERS = bytes({HIT: GetCode.HIT, MISS: GetCode.MISS}.get(code, _IN_DOUBT) for code in range(256))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCounts:
    """What was answered without the daemon, and every kind of doubt."""

    #: Keys of lookups.
    lookups: int = 0
    #: Pages of gets.
    hits: int = 0
    misses: int = 0
    #: Pages that changed while they were read, and were read once more.
    raced: int = 0
    #: Copies whose bytes failed their sum.
    sums_failed: int = 0
    #: Keys that only the daemon could answer: of another tier or codec, in doubt, after an end.
    left: int = 0

    def __add__(self, other: LocalCounts) -> LocalCounts:
        return LocalCounts(
            **{
                item.name: getattr(self, item.name) + getattr(other, item.name)
                for item in fields(self)
            }
        )


def _joined(codes: NDArray[np.uint8], others: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """HIT where both are, DOUBT where one is."""
    joined = np.where((codes == HIT) & (others == HIT), np.uint8(HIT), np.uint8(MISS))
    joined[(codes == DOUBT) | (others == DOUBT)] = DOUBT
    return joined


class LocalReads:
    """`tell_soon` has `link.tell` called within a second; `on_end` is called when the link is found
    to have ended.
    """

    def __init__(
        self, link: LocalLink, tell_soon: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        self.link = link
        self._tell_soon = tell_soon
        self._on_end = on_end
        self._lock = threading.RLock()  # a finalizer may look something up in the middle of a call
        self._totals = dict.fromkeys((item.name for item in fields(LocalCounts)), 0)

    @property
    def counts(self) -> LocalCounts:
        # One step: who asks must not wait for a call that was interrupted.
        return LocalCounts(**self._totals.copy())

    def lookup(
        self,
        layout: Layout,
        opened: OpenedNamespace,
        keys: Sequence[bytes],
        *,
        is_exact: bool = False,
    ) -> LookupReply | None:
        """None: only the daemon can say. HIT needs every shard, as the daemon's lookup does."""
        shard, number = layout.shard.index, opened.namespace_number
        view = self.link.view
        if layout.shard_count == 1 and len(keys) <= ANSWER_KEYS_MAX:
            return self._lookup_few(opened, shard, keys, is_exact=is_exact)
        joined = np.frombuffer(joined_keys(keys), np.uint8).reshape(-1, KEY_BYTES)

        def looked_up(shard: int) -> Found:
            return view.lookup(
                joined, namespace=number, shard=shard, with_entries=False, is_exact=is_exact
            )

        try:
            found = looked_up(shard)
            codes, tiers = found.codes, found.tiers
            for other in range(layout.shard_count if layout.shard_count > 1 else 0):
                if other != shard:
                    there = looked_up(other)
                    codes = _joined(codes, there.codes)
                    tiers = np.minimum(tiers, there.tiers)
            is_current = view.namespace_is_current(number, opened.generation)
        except ClientClosed:
            return None
        answers = codes.tobytes().translate(_ANSWERS)
        if not is_current or _IN_DOUBT in answers:
            self._count(left=len(keys))
            return None
        return self._answered(number, shard, answers, tiers.tobytes())

    def _lookup_few(
        self, opened: OpenedNamespace, shard: int, keys: Sequence[bytes], *, is_exact: bool
    ) -> LookupReply | None:
        number = opened.namespace_number
        try:
            found = self.link.view.answer(
                keys,
                namespace=number,
                shard=shard,
                generation=opened.generation,
                is_exact=is_exact,
            )
        except ClientClosed:
            return None
        if found is None:
            self._count(left=len(keys))
            return None
        return self._answered(number, shard, found[0].translate(_ANSWERS), found[1])

    def _answered(
        self, namespace: int, shard: int, answers: bytes, tiers: bytes
    ) -> LookupReply | None:
        count = len(answers)
        # Looked at last: what a daemon that has ended since has said counts for nothing.
        if not self._is_alive():
            self._count(left=count)
            return None
        with self._lock:
            self._totals["lookups"] += count
        hits = answers.count(GetCode.HIT)
        if self.link.note_lookup(namespace, shard, hits=hits, misses=count - hits):
            self._tell_soon()
        return LookupReply(answers, tiers)

    def get(
        self, reader: Reader, options: GetOptions, opened: OpenedNamespace, deadline: Deadline
    ) -> Generator[None, None, list[int]]:
        """Gives pages their outcome, slice by slice; returns the indices that are left to the
        daemon.
        """
        number, count = opened.namespace_number, len(reader.keys)
        local = LocalGet(self.link, reader, options, opened, deadline)
        try:
            yield from local.slices()
            is_valid = self.link.view.namespace_is_current(number, opened.generation)
        except ClientClosed:
            is_valid = False
        # Looked at last: what a daemon that has ended since has said counts for nothing.
        if not is_valid or not self._is_alive():
            reader.forget()
            self._count(left=count)
            return list(range(count))
        read = local.read
        misses = reader.codes.count(GetCode.MISS)
        self._count(
            hits=len(read),
            misses=misses,
            raced=local.raced,
            sums_failed=local.sums_failed,
            left=len(local.left),
        )
        keys = reader.keys if len(read) == count else [reader.keys[i] for i in sorted(read)]
        nbytes = len(keys) * local.nbytes
        shard = reader.layout.shard.index
        if self.link.note_get(number, shard, keys, nbytes=nbytes, misses=misses):
            self._tell_soon()
        return sorted(local.left)

    def viewed(self, layout: Layout, opened: OpenedNamespace, keys: list[bytes]) -> None:
        """Pages were used in place, and verified there."""
        number, nbytes = opened.namespace_number, len(keys) * layout.raw_bytes
        self._count(hits=len(keys))
        if self.link.note_get(number, layout.shard.index, keys, nbytes=nbytes, misses=0):
            self._tell_soon()

    def _is_alive(self) -> bool:
        if self.link.is_alive():
            return True
        self._on_end()
        return False

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._totals[name] += count
