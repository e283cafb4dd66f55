"""One offload or load, done in the thread of its lane: device page -> staging -> service, and back.

Promise: each page is let go of (unpinned) once nothing of this transfer touches it any more, and
all are when the call ends, however it ends. Device copies that have begun are waited for: they
depend on the device alone. Everything before them keeps to the deadline.

A pool in host memory needs no staging: the client moves its pages where they lie. For others a lane
has two halves of page-locked memory: while one is put or got, the other is copied.

A Lane belongs to one thread; `Pinned` may be used from any.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import torch

from kvtier.client.arguments import GetArguments, PutArguments
from kvtier.client.device.arrivals import Arrivals
from kvtier.client.device.outcomes import LoadResult, OffloadResult
from kvtier.client.device.pool import DevicePool
from kvtier.client.device.streams import CopyStream, Fence
from kvtier.client.sync import Namespace
from kvtier.core.page import GetCode, PutCode
from kvtier.errors import DeadlineExceeded
from kvtier.transfer.planes.deadline import Deadline

__all__ = ["Lane", "LoadOrder", "OffloadOrder", "Pinned"]

_HALVES: Final = 2

V = TypeVar("V")


class Pinned:
    """The pages that one transfer holds in the pool, each let go of once."""

    def __init__(self, pool: DevicePool, ids: Sequence[int]) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._left = dict.fromkeys(ids)
        pool.pin(ids)

    def release(self, ids: Iterable[int]) -> None:
        with self._lock:
            mine = [page for page in ids if page in self._left]
            for page in mine:
                del self._left[page]
        self._pool.unpin(mine)

    def release_all(self) -> None:
        self.release(list(self._left))


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOrder:
    """`after`: the pages' bytes are there from then on."""

    keys: Sequence[bytes]
    ids: Sequence[int]
    pinned: Pinned
    after: Fence
    deadline: Deadline
    options: PutArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """`after`: from then on nobody reads what was in the pages before. With `arrivals` the device
    gets layer after layer, and they are told when all of it is under way.
    """

    keys: Sequence[bytes]
    ids: Sequence[int]
    pinned: Pinned
    after: Fence
    deadline: Deadline
    options: GetArguments
    arrivals: Arrivals | None = None


class Lane:
    """The way between one pool and one namespace, in one direction at a time."""

    def __init__(
        self,
        pool: DevicePool,
        namespace: Namespace,
        stream: CopyStream,
        *,
        staging_bytes_max: int,
    ) -> None:
        self._pool = pool
        self._namespace = namespace
        self._stream = stream
        self._pages = min(pool.pages, max(1, staging_bytes_max // _HALVES // pool.form.nbytes))
        if not stream.is_direct:
            # Now: page-locking takes longer than a transfer may.
            shape = (_HALVES, self._pages, pool.form.nbytes)
            is_cuda = pool.device.type == "cuda"
            self._staging = torch.zeros(shape, dtype=torch.uint8, pin_memory=is_cuda)

    def mark(self) -> Fence:
        """See CopyStream.mark."""
        return self._stream.mark()

    def offload(self, order: OffloadOrder) -> OffloadResult:
        """Puts the pages. Raises what the client raises."""
        try:
            if not order.after.wait(order.deadline):
                return OffloadResult.of_all(len(order.ids), PutCode.TIMEOUT)
            if self._stream.is_direct:
                return self._put(order, order.keys, self._pool.rows, order.ids)
            return self._offload_staged(order)
        finally:
            order.pinned.release_all()

    def load(self, order: LoadOrder) -> LoadResult:
        """Gets the pages. Raises what the client raises."""
        try:
            if not self._stream.is_direct:
                return self._load_staged(order)
            if not order.after.wait(order.deadline):
                return LoadResult.of_all(len(order.ids), GetCode.TIMEOUT)
            result = self._get(order, order.keys, self._pool.rows, order.ids)
            if order.arrivals is not None:
                order.arrivals.tell(result, ())
            return result
        finally:
            order.pinned.release_all()

    def _offload_staged(self, order: OffloadOrder) -> OffloadResult:
        parts = self._parts(len(order.ids))
        result = OffloadResult(reasons=())
        if not parts:
            return result
        fence = self._read(order.ids[parts[0]], 0)
        try:
            for number, part in enumerate(parts):
                fence.wait()
                ids = order.ids[part]
                order.pinned.release(ids)
                if number + 1 < len(parts):
                    fence = self._read(order.ids[parts[number + 1]], number + 1)
                result += self._put(order, order.keys[part], self._half(number)[: len(ids)])
        finally:
            fence.wait()  # also when a put raised: the device still reads a page
        return result

    def _load_staged(self, order: LoadOrder) -> LoadResult:
        result = LoadResult.of_all(0, GetCode.MISS)
        fences: list[Fence] = []
        parts = self._parts(len(order.ids))
        try:
            for number, part in enumerate(parts):
                if number >= _HALVES:
                    fences[number - _HALVES].wait()  # what this half held has been copied
                ids = order.ids[part]
                got = self._get(order, order.keys[part], self._half(number)[: len(ids)])
                if not order.after.wait(order.deadline):
                    got = LoadResult.of_all(len(ids), GetCode.TIMEOUT)
                result += got
                if order.arrivals is None or number + 1 < len(parts):
                    fences.append(self._write(got, ids, number))
                else:
                    # Its layers come behind the parts before it, which are on the same stream.
                    by_layer = self._write_layers(got, ids, number)
                    fences += by_layer
                    order.arrivals.tell(result, by_layer)
        finally:
            for fence in fences:
                fence.wait()
        return result

    def _read(self, ids: Sequence[int], number: int) -> Fence:
        """Device pages to a half of the staging memory."""
        half, rows = self._half(number), self._pool.rows

        def copy() -> None:
            for place, page in enumerate(ids):
                half[place].copy_(rows[page], non_blocking=True)

        return self._stream.submit(copy)

    def _write(self, got: LoadResult, ids: Sequence[int], number: int) -> Fence:
        """The hits in a half of the staging memory to their device pages; no other page is
        touched.
        """
        half, rows = self._half(number), self._pool.rows
        hits = _hits(got, ids)

        def copy() -> None:
            for place, page in hits:
                rows[page].copy_(half[place], non_blocking=True)

        return self._stream.submit(copy)

    def _write_layers(self, got: LoadResult, ids: Sequence[int], number: int) -> list[Fence]:
        """As `_write`, one copy a layer; what a page has beside its layers goes with the first."""
        half, rows, form = self._half(number), self._pool.rows, self._pool.form
        hits = _hits(got, ids)
        run = form.scales_offset // (2 * form.layers)

        def copy(layer: int) -> None:
            starts = (layer * run, (form.layers + layer) * run)
            spans = [slice(start, start + run) for start in starts]
            if layer == 0 and form.scales_offset < form.nbytes:
                spans.insert(0, slice(form.scales_offset, form.nbytes))
            for place, page in hits:
                for span in spans:
                    rows[page, span].copy_(half[place, span], non_blocking=True)

        return [self._stream.submit(partial(copy, layer)) for layer in range(form.layers)]

    def _put(
        self,
        order: OffloadOrder,
        keys: Sequence[bytes],
        memory: torch.Tensor,
        at: Sequence[int] | None = None,
    ) -> OffloadResult:
        options = order.options.copy()
        try:
            options["deadline"] = order.deadline.remaining()
        except DeadlineExceeded:
            return OffloadResult.of_all(len(keys), PutCode.TIMEOUT)
        put = self._namespace.put(keys, memory, at=at, **options)
        return OffloadResult(reasons=tuple(put.reasons))

    def _get(
        self,
        order: LoadOrder,
        keys: Sequence[bytes],
        memory: torch.Tensor,
        at: Sequence[int] | None = None,
    ) -> LoadResult:
        options = order.options.copy()
        try:
            options["deadline"] = order.deadline.remaining()
        except DeadlineExceeded:
            return LoadResult.of_all(len(keys), GetCode.TIMEOUT)
        items = list(self._namespace.get(keys, out=memory, at=at, **options))
        return LoadResult(
            reasons=tuple(item.reason for item in items),
            tiers=tuple(item.tier for item in items),
            lossy=tuple(item.lossy for item in items),
        )

    def _parts(self, count: int) -> list[slice]:
        """`count` pages in runs that fit into a half."""
        return [slice(at, min(at + self._pages, count)) for at in range(0, count, self._pages)]

    def _half(self, number: int) -> torch.Tensor:
        return self._staging[number % _HALVES]


def _hits(got: LoadResult, ids: Sequence[int]) -> list[tuple[int, int]]:
    """(position, page) of each."""
    return [
        (place, page)
        for place, (page, reason) in enumerate(zip(ids, got.reasons, strict=True))
        if reason is GetCode.HIT
    ]
