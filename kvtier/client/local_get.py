"""One get by the shared directory: copied into the caller's memory and verified there.

Order for each page: entry -> copy and sum in one pass -> namespace. Every page is verified,
whatever the connection's `verify` says: it costs next to nothing here, and without it a copy that
was written anew while it was read would go unnoticed. A copy that passed its sum is the page that
was there when the get began, whatever has become of the entry since. One that failed is looked at
once more if its entry has changed, and left to the daemon if not: that finds out whether the page
is damaged, and tries the next tier.

A LocalGet belongs to one call and one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.client.buffers import address_of
from kvtier.client.local_link import LocalLink
from kvtier.client.reading import GetOptions, Reader
from kvtier.core.page import Codec
from kvtier.packing.checksum import bound_block
from kvtier.transfer.local.protocol import DOUBT, MISS, Found, Readable
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import OpenedNamespace

__all__ = ["LocalGet"]

_TRIES: Final = 2
#: Copied between two looks at the clock; also the most memory for pages that have no place of their
#: own in host memory.
_SLICE_BYTES: Final = 16 << 20


class LocalGet:
    """`left` are the indices that only the daemon can answer; all others have their outcome."""

    def __init__(
        self,
        link: LocalLink,
        reader: Reader,
        options: GetOptions,
        opened: OpenedNamespace,
        deadline: Deadline,
    ) -> None:
        self._deadline = deadline
        self._link = link
        self._reader = reader
        self._options = options
        self._opened = opened
        #: Of a page.
        self.nbytes = reader.layout.raw_bytes
        self._block = bound_block(
            fingerprint=opened.fingerprint,
            namespace_generation=opened.generation,
            shard=reader.layout.shard.index,
            codec=Codec.RAW,
            length=self.nbytes,
        )
        self.left: set[int] = set()
        self.read: list[int] = []
        self.raced = 0
        self.sums_failed = 0

    def slices(self) -> Iterator[None]:
        """Does the get, pausing after every so many bytes: who runs it may do something else then,
        or stop. Raises ClientClosed when the link ends meanwhile.
        """
        every = np.arange(len(self._reader.keys))
        if Codec.RAW not in self._options.accept:
            self.left.update(every.tolist())
            return
        step = max(1, _SLICE_BYTES // self.nbytes)
        for begin in range(0, len(every), step):
            if begin and self._deadline.has_passed:
                self._reader.time_out(every[begin:])
                return
            todo = every[begin : begin + step]
            for _ in range(_TRIES):
                if len(todo):
                    todo = self._look(todo)
            self.left.update(todo.tolist())
            yield

    def _look(self, todo: NDArray[np.int64]) -> NDArray[np.int64]:
        """One look at the pages of `todo`; those to look at once more."""
        reader, view = self._reader, self._link.view
        keys = reader.keys
        if len(todo) < len(keys):
            keys = [keys[index] for index in todo.tolist()]
        found = view.lookup(
            keys, namespace=self._opened.namespace_number, shard=reader.layout.shard.index
        )
        readable = view.readable(
            found,
            self._block,
            arena_bytes=len(self._link.arena),
            length=self.nbytes,
            lossy_ok=self._options.lossy_ok,
        )
        rows = readable.rows
        if len(rows) < len(todo):
            self.left.update(todo[readable.outcomes == DOUBT].tolist())
            reader.miss(todo[readable.outcomes == MISS])
        passed = self._copy(todo[rows], readable)
        if passed.all():
            self._settle(todo, rows, found)
            return todo[:0]
        self._settle(todo, rows[passed], found)
        failed = rows[~passed]
        self.sums_failed += len(failed)
        is_same = view.recheck(found)[failed]
        self.left.update(todo[failed[is_same]].tolist())
        again = todo[failed[~is_same]]
        self.raced += len(again)
        return again

    def _copy(self, indices: NDArray[np.int64], readable: Readable) -> NDArray[np.bool_]:
        """Copies pages to where they are wanted; which are whole there, shape (k,)."""
        reader, link = self._reader, self._link
        targets = reader.rows.addresses(indices)
        # What has no place of its own in host memory goes through a copy.
        passing: dict[int, memoryview] = {}
        if not targets.all():
            for at in np.flatnonzero(targets == 0).tolist():
                passing[at] = memoryview(bytearray(self.nbytes))
                targets[at] = address_of(passing[at])
        sources = readable.offsets + link.arena_address
        made = link.summer.copy(sources, targets, self.nbytes, readable.blocks).view(np.uint64)
        passed: NDArray[np.bool_] = (made == readable.sums).all(axis=1)
        for at, copy in passing.items():
            if passed[at]:
                reader.rows.store(int(indices[at]), copy)
        return passed

    def _settle(self, todo: NDArray[np.int64], rows: NDArray[np.int64], found: Found) -> None:
        indices = todo[rows]
        self._reader.hit(
            indices,
            boot_id=self._opened.boot_id,
            slots=found.slots[rows],
            generations=found.generations[rows],
            lossy=found.lossy[rows].astype(np.uint8),
        )
        self.read += indices.tolist()
