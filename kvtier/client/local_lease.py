"""The views of a lease: read-only, of the daemon's own memory where that can be had, and what they
are worth.

Order: the directory is asked once -> views -> the owner of the lease copies out of them -> the
bytes in place are summed -> entries, namespace and daemon are looked at once more. An entry that is
still there has the generation it had when its view was made, and a generation is given to one
allocation alone: so the daemon has given the slot to nobody in between, and what was copied is what
was summed, unless a writer without any right to the slot changed it and changed it back. The sum is
that of the page's maker and is bound to key, family and namespace generation. Asked in any other
order, a slot could be given away after the last look at its entry.

A view stays mapped for as long as somebody holds it, also when the daemon has died. It never
becomes invalid memory, only other bytes. A forked child does not get the memory: to read a view
there ends the child (SIGSEGV).

Belongs to the connection's event loop; views may be used in any thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.client.arguments import GetArguments, GetCall
from kvtier.client.batches import get_code
from kvtier.client.buffers import address_of
from kvtier.client.local_reads import LocalReads
from kvtier.core.page import KEY_BYTES, Codec, GetCode, Tier
from kvtier.errors import ClientClosed, KvtierError
from kvtier.packing.checksum import bound_blocks
from kvtier.packing.layout import Layout
from kvtier.packing.record import HEADER_BYTES
from kvtier.transfer.local.entry import entry_fits
from kvtier.transfer.local.protocol import DOUBT, Found
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import Hints, OpenedNamespace

if TYPE_CHECKING:
    import torch

    from kvtier.client.namespace import AsyncNamespace

__all__ = ["LeaseViews", "PagesInPlace", "ViewSource", "segments"]

_SLOT_BYTES: Final = 4096
#: Summed between two turns of the event loop.
_SLICE_BYTES: Final = 16 << 20


class ViewSource(IntEnum):
    """Where the view of a page comes from. All but IN_PLACE and NOT_HELD are copies, and the name
    says why.
    """

    #: No view: the key is not held, or no view was asked for yet.
    NOT_HELD = 0
    #: The daemon's own memory.
    IN_PLACE = 1
    #: This connection does not read shared memory; `kv.local.reason` says why.
    NOT_ATTACHED = 2
    #: The page is not in host memory.
    LOWER_TIER = 3
    #: Stored packed, or rounded by a codec once: without `lossy_ok` there is no view at all.
    PACKED = 4
    #: The directory has no sum by which it could be verified in place.
    NO_SUM = 5
    #: The directory does not have it (any more), or was being changed.
    NOT_LISTED = 6


class PagesInPlace:
    """The pages of `keys` that the directory has: `views` by index into `keys`, `sources` for each
    key. Raises ClientClosed when the link has ended, ForkedClient.
    """

    def __init__(
        self,
        reads: LocalReads,
        layout: Layout,
        opened: OpenedNamespace,
        *,
        keys: Sequence[bytes],
        lossy_ok: bool,
    ) -> None:
        self._reads = reads
        self._link = link = reads.link
        self._layout = layout
        self._opened = opened
        self._keys = keys
        found = link.view.lookup(keys, namespace=opened.namespace_number, shard=layout.shard.index)
        is_ours, self.sources = _readable(found, layout, len(link.arena), lossy_ok)
        self._rows = np.flatnonzero(is_ours)
        self._found = found
        begins = found.slots[self._rows].astype(np.int64)
        begins = begins * _SLOT_BYTES + HEADER_BYTES
        self._sources = begins + link.arena_address
        nbytes = layout.raw_bytes
        #: Slices of the arena, which is mapped as long as one of them is held.
        self.views = {
            row: link.arena[begin : begin + nbytes].data.toreadonly()
            for row, begin in zip(self._rows.tolist(), begins.tolist(), strict=True)
        }
        self._noted: set[int] = set()

    def sums(self) -> Iterator[list[tuple[int, bool]]]:
        """Sums the bytes in place, a slice at a time: (index, whether they are the maker's)."""
        nbytes = self._layout.raw_bytes
        step = max(1, _SLICE_BYTES // nbytes)
        for begin in range(0, len(self._rows), step):
            rows = self._rows[begin : begin + step]
            blocks = bound_blocks(
                [self._keys[row] for row in rows.tolist()],
                fingerprint=self._opened.fingerprint,
                namespace_generation=self._opened.generation,
                shard=self._layout.shard.index,
                codec=Codec.RAW,
                length=nbytes,
            )
            made = self._link.summer.sums(self._sources[begin : begin + step], nbytes, blocks)
            is_whole = (made.view(np.uint64) == self._found.sums[rows]).all(axis=1)
            yield list(zip(rows.tolist(), is_whole.tolist(), strict=True))

    def gone(self) -> tuple[GetCode, set[int]]:
        """Asked after the last look at the bytes. (HIT, indices whose entry is not the one that it
        was), or (why nothing of this memory counts any more, nothing).
        """
        link, number = self._link, self._opened.namespace_number
        try:
            unchanged = link.view.recheck(self._found)
            is_current = link.view.namespace_is_current(number, self._opened.generation)
            is_open = link.view.is_open
        except ClientClosed:
            return GetCode.UNAVAILABLE, set()
        # Looked at last: what a daemon that has ended since has said counts for nothing.
        if not is_open or not link.is_alive():
            return GetCode.UNAVAILABLE, set()
        if not is_current:
            return GetCode.STALE, set()
        return GetCode.HIT, {row for row in self._rows.tolist() if not unchanged[row]}

    def note(self, indices: Sequence[int]) -> None:
        """These pages were used; each counts once."""
        new = [index for index in indices if index in self.views and index not in self._noted]
        if not new:
            return
        self._noted.update(new)
        keys = [self._keys[index] for index in new]
        self._reads.viewed(self._layout, self._opened, keys)


class LeaseViews:
    """Of the keys of one lease: `sources` has one for each."""

    def __init__(self, ns: AsyncNamespace, keys: list[bytes]) -> None:
        self._ns = ns
        self._keys = keys
        self.sources = [ViewSource.NOT_HELD] * len(keys)
        self._views: list[memoryview | None] = [None] * len(keys)
        self._held: list[int] = []  # indices of keys
        self._in_place: PagesInPlace | None = None  # of `_held`
        self._copied: dict[int, GetCode] = {}  # what became of copies
        self._is_dropped = False

    def look(self, pinned: OpenedNamespace, held: list[int], *, lossy_ok: bool) -> None:
        """Views of what the shared directory has of the keys that are held. Only once."""
        if self._held:
            return
        self._held = held
        for index in held:
            self.sources[index] = ViewSource.NOT_ATTACHED
        reads = self._ns.link.local.reads(pinned.boot_id)
        if reads is None or not pinned.namespace_number:
            return
        keys = [self._keys[index] for index in held]
        try:
            found = PagesInPlace(reads, self._ns.layout, pinned, keys=keys, lossy_ok=lossy_ok)
        except ClientClosed:
            return  # the daemon has just ended
        self._in_place = found
        for at, index in enumerate(held):
            self.sources[index] = found.sources[at]
            self._views[index] = found.views.get(at)

    async def complete(self, *, lossy_ok: bool, deadline: Deadline) -> list[memoryview | None]:
        """The views of all keys, copies of those that have none yet."""
        missing = [index for index in self._held if self._views[index] is None]
        if missing:
            keys = [self._keys[index] for index in missing]
            options: GetArguments = {"lossy_ok": lossy_ok}
            call = GetCall.of(self._ns.layout, keys, None, None, options, deadline=deadline)
            got = await self._ns.send_get(call)
            for index, page, code in zip(missing, got.pages, got.reasons, strict=True):
                if self._views[index] is None and not self._is_dropped:
                    self._copied[index] = code
                    self._views[index] = None if page is None else memoryview(page).toreadonly()
        return list(self._views)

    def drop(self) -> None:
        """Holds no memory any more."""
        self._is_dropped = True
        self._in_place, self._views = None, [None] * len(self._keys)

    async def judge(self, codes: bytearray, pinned: OpenedNamespace, deadline: Deadline) -> GetCode:
        """Puts what became of each page in place of the HIT in `codes`; HIT, or why none counts."""
        for index, code in self._copied.items():
            codes[index] = code
        in_place, held = self._in_place, self._held
        if in_place is None:
            return await self._asked(pinned, deadline)
        of_bytes = dict.fromkeys(in_place.views, GetCode.TIMEOUT)
        summed = 0
        for part in in_place.sums():
            for at, is_whole in part:
                of_bytes[at] = GetCode.HIT if is_whole else GetCode.CORRUPT
            summed += len(part)
            if summed < len(of_bytes):
                await asyncio.sleep(0)
                if deadline.has_passed:
                    break
        ended, gone = in_place.gone()
        for at, code in of_bytes.items():
            codes[held[at]] = GetCode.MISS if at in gone else code
        return ended

    async def settle(self, codes: bytearray, deadline: Deadline) -> None:
        """Passes on what came of it: pages that were used, and pages whose sum is wrong, at which
        the daemon is to look itself: it takes them out.
        """
        if self._in_place is None:
            return
        used = [at for at, index in enumerate(self._held) if codes[index] == GetCode.HIT]
        self._in_place.note(used)
        wrong = [
            self._keys[index]
            for index in self._held
            if codes[index] == GetCode.CORRUPT and index not in self._copied
        ]
        if wrong and not deadline.has_passed:
            call = GetCall.of(self._ns.layout, wrong, None, None, {}, deadline=deadline)
            await self._ns.send_get(call)

    async def _asked(self, pinned: OpenedNamespace, deadline: Deadline) -> GetCode:
        """What a daemon whose memory is not read here says of session and namespace: HIT, or why
        nothing counts any more.
        """
        try:
            with self._ns.link.guarded():
                nothing = [bytes(KEY_BYTES)]
                found = await self._ns.link.plane.lookup(pinned.handle, nothing, Hints(), deadline)
        except KvtierError as error:
            code = get_code(error)
        else:
            code = GetCode.STALE if GetCode.STALE in found.codes else GetCode.HIT
        self._ns.learn(code, pinned)
        return code


def _readable(
    found: Found, layout: Layout, arena_bytes: int, lossy_ok: bool
) -> tuple[NDArray[np.bool_], list[ViewSource]]:
    """Which pages can be viewed in place, and the source of each."""
    is_raw = found.codecs == np.uint64(Codec.RAW)
    is_raw &= found.lengths == np.uint64(layout.raw_bytes)
    if not lossy_ok:
        is_raw &= found.lossy == np.uint64(0)
    sources = np.full(len(is_raw), ViewSource.IN_PLACE, np.uint8)
    sources[~entry_fits(found.entries, arena_bytes)] = ViewSource.NO_SUM
    sources[~is_raw] = ViewSource.PACKED
    sources[found.tiers != Tier.HOST] = ViewSource.LOWER_TIER
    sources[~found.hits | (found.codes == DOUBT)] = ViewSource.NOT_LISTED
    return sources == ViewSource.IN_PLACE, [ViewSource(source) for source in sources.tolist()]


class _Writable:
    """Read-only memory that says it is not, which is what torch can take."""

    def __init__(self, view: memoryview) -> None:
        self._view = view  # whoever holds the array holds this
        self.__array_interface__ = {
            "version": 3,
            "shape": (view.nbytes,),
            "typestr": "|u1",
            "data": (address_of(view), False),
        }


def segments(torch: Any, layout: Layout, view: memoryview) -> dict[str, torch.Tensor]:
    """A raw page as its segments by name, in the shape and dtype in which they are stored, all over
    the memory of `view`, which they hold.

    Torch knows no read-only tensors and warns of memory that is read-only. The filter of warnings
    is the whole process's, so the warning is not silenced but avoided; to write to one of these
    tensors ends the process where the memory is the daemon's.
    """
    flat = torch.from_numpy(np.asarray(_Writable(view)))
    return {
        span.segment.name: flat[span.offset : span.offset + span.nbytes]
        .view(getattr(torch, span.dtype))
        .reshape(span.shape)
        for span in layout.spans(Codec.RAW)
    }
