"""Tensors as rows of pages. Torch is never loaded here: whoever passes a tensor has loaded it.

A contiguous tensor on the CPU is used in place. A tensor on a GPU is copied through host memory on
the stream that was current in the calling thread when the rows were made: a copy waits for the
caller's earlier work on that stream, and is done when the call returns. Work on other streams is
the caller's to order.

Rows belong to one call; they may be used in another thread than the one that made them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from kvtier.client.buffers import (
    Allocated,
    FlatRows,
    PageRows,
    Request,
    Rows,
    is_tensor,
    page_ids,
    row_shape,
    rows_of_array,
    rows_of_buffer,
    size_error,
)
from kvtier.client.overlap import Footprint
from kvtier.errors import LayoutError, PageSizeError
from kvtier.packing.layout import Layout

if TYPE_CHECKING:
    import torch

__all__ = ["TensorRows", "check_dtype", "rows_of"]


def rows_of(memory: object, request: Request, at: object = None) -> Rows:
    """The pages in whatever the caller passed. Raises PageSizeError naming index, have and need,
    also for pages to be filled that share memory: the last one would be in the place of others.

    `memory` is a tensor, ndarray or buffer with the pages along its first dimension (or,
    contiguous, cut into equal parts), or a sequence of those with one page each; with `at`, the
    places of the pages in a bigger pool. None asks for new memory.
    """
    if memory is None and at is None and request.writable:
        return Allocated(request)
    rows = _rows(memory, request, at)
    if request.writable and not request.is_one_page and rows.shares_memory():
        raise PageSizeError(
            f"{request.name}: pages share memory, one would be written over another",
            remedy="pass memory with room for every page, each in a place of its own",
        )
    return rows


def check_dtype(memory: object, name: str, layout: Layout) -> None:
    """Raises LayoutError for floating-point memory of another dtype than the layout's, and
    PageSizeError for tensors without memory.

    As many bytes of another format would be stored without a word and come back as other numbers.
    Bytes and integers are taken for raw memory.
    """
    known = {segment.dtype for segment in layout.segments}
    for item in memory if isinstance(memory, list | tuple) else [memory]:
        if is_tensor(item):
            if item.is_meta:
                raise PageSizeError(
                    f"{name} is a tensor on device meta, which has no bytes",
                    remedy="pass a tensor on a real device",
                )
            dtype = str(item.dtype).removeprefix("torch.")
        elif isinstance(item, np.ndarray) and item.dtype.kind not in "biu":
            dtype = item.dtype.name
        else:
            continue
        if "float" in dtype and dtype not in known:
            raise LayoutError(
                f"{name} is {dtype}, the layout has {', '.join(sorted(known))}",
                remedy="convert it, or pass it as uint8 if the bytes are what the layout says",
            )


def _rows(memory: object, request: Request, at: object) -> Rows:
    if is_tensor(memory):
        return _rows_of_tensor(memory, request, at)
    if isinstance(memory, np.ndarray):
        return rows_of_array(memory, request, at)
    if not isinstance(memory, list | tuple):
        return rows_of_buffer(memory, request, at)  # type: ignore[arg-type]
    places = range(len(memory)) if at is None else page_ids(at, len(memory), request)
    if len(places) != request.count:
        raise size_error(request, "the sequence", len(memory), request.count, unit="pages")
    pages = []
    for place in places:
        one = Request(
            name=f"{request.name}[{place}]",
            count=1,
            nbytes=request.nbytes,
            writable=request.writable,
            is_one_page=True,
        )
        pages.append(_row_of(memory[place], one))
    return PageRows(pages)


def _row_of(page: object, request: Request) -> Rows:
    if page is None:
        raise PageSizeError(f"{request.name} is None", remedy="pass memory for every page")
    if is_tensor(page) or isinstance(page, np.ndarray):
        # A batch of one, so that a strided page is a row like any other.
        return rows_of(page[None], request)
    return rows_of(page, request)


class TensorRows(Rows):
    """Pages along the first dimension of a tensor that cannot be used in place as a whole."""

    def __init__(self, tensor: torch.Tensor, ids: Sequence[int] | None) -> None:
        self._torch = _torch()
        self._tensor = tensor
        self._ids = ids
        self._stream = (
            self._torch.cuda.current_stream(tensor.device) if tensor.device.type == "cuda" else None
        )

    def direct(self, index: int) -> memoryview | None:
        row = self._row(index)
        if row.device.type != "cpu" or not row.is_contiguous():
            return None
        return _flat(self._torch, row)

    def load(self, index: int) -> memoryview:
        with self._on_stream():
            row = self._row(index).contiguous()
            # To the host at once: the copy has ended when this returns.
            copy = row.cpu() if row.device.type != "cpu" else row.clone()
        return _flat(self._torch, copy)

    def store(self, index: int, data: memoryview) -> None:
        row = self._row(index)
        # A tensor over read-only memory is something torch warns of.
        source = self._torch.frombuffer(
            bytearray(data) if data.readonly else data, dtype=self._torch.uint8
        )
        with self._on_stream():
            row.copy_(source.view(row.dtype).reshape(row.shape))
            if self._stream is not None:
                self._stream.synchronize()

    def footprints(self) -> list[Footprint]:
        count = len(self._tensor if self._ids is None else self._ids)
        return [_footprint(self._row(index)) for index in range(count)]

    def shares_memory(self) -> bool:
        return not _footprint(self._tensor).is_nested() and super().shares_memory()

    def _row(self, index: int) -> torch.Tensor:
        return self._tensor[index if self._ids is None else self._ids[index]]

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with self._torch.cuda.stream(self._stream):
            yield


def _rows_of_tensor(tensor: torch.Tensor, request: Request, at: object) -> Rows:
    torch = _torch()
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise PageSizeError(
            f"{request.name} is a {tensor.layout} tensor", remedy="pass a dense tensor"
        )
    pool_pages = len(tensor) if tensor.ndim else 0
    ids = None if at is None else page_ids(at, pool_pages, request)
    nbytes = tensor.numel() * tensor.element_size()
    by_row = row_shape(request, tensor.shape, nbytes, is_pool=ids is not None)
    if tensor.is_contiguous():
        if tensor.device.type == "cpu":
            return FlatRows(_flat(torch, tensor), request.nbytes, ids)
        if not by_row:
            tensor = tensor.reshape(-1).view(torch.uint8).reshape(request.count, -1)
    elif not by_row:
        raise PageSizeError(
            f"{request.name} of shape {tuple(tensor.shape)} is strided and its first dimension "
            f"is not the {request.count} pages",
            remedy="make the first dimension the pages, or the tensor contiguous",
        )
    return TensorRows(tensor, ids)


def _footprint(tensor: torch.Tensor) -> Footprint:
    size = tensor.element_size()
    return Footprint(
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(stride * size for stride in tensor.stride()),
        size,
        str(tensor.device),
    )


def _flat(torch: ModuleType, tensor: torch.Tensor) -> memoryview:
    flat: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return flat


def _torch() -> ModuleType:
    return sys.modules["torch"]
