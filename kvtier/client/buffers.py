"""Where page bytes come from and go to: buffers, ndarrays and tensors, all seen as rows of one page
each.

A row that is contiguous host memory is used in place. Any other row (strided, on a GPU) goes
through a contiguous copy: `load` makes one of it, `store` writes one into it. Sizes, ids and
writability are checked here, before anything is sent.

Rows hold the caller's memory and belong to one call. For tensors on a GPU see `tensors`.
"""

from __future__ import annotations

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from kvtier.client.overlap import Footprint, shares_memory
from kvtier.errors import PageSizeError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

__all__ = [
    "Allocated",
    "ArrayRows",
    "FlatRows",
    "PageRows",
    "Request",
    "Rows",
    "address_of",
    "is_tensor",
    "page_ids",
    "row_shape",
    "size_error",
]

_FORMS: Final = "pass a tensor, ndarray or buffer, or a sequence of one for each page"


def address_of(view: memoryview) -> int:
    """Where contiguous memory begins; 0 for none."""
    if not view.nbytes:
        return 0
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether `value` is a tensor, without loading torch to find out. While another thread loads it
    nobody has one.
    """
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(value, kind)


class Rows(ABC):
    """Pages 0, 1, ... of a batch, each of the same number of bytes."""

    @abstractmethod
    def direct(self, index: int) -> memoryview | None:
        """The bytes of the page in place, or None if they are not contiguous host memory."""

    def address(self, index: int) -> int | None:
        """Where the page lies if `direct` has it; good as long as these rows are."""
        view = self.direct(index)
        return None if view is None else address_of(view)

    def addresses(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """`address` of many pages, 0 for those that have none."""
        found = [self.address(index) or 0 for index in indices.tolist()]
        return np.array(found, np.int64)

    @abstractmethod
    def load(self, index: int) -> memoryview:
        """A contiguous copy of the page."""

    @abstractmethod
    def store(self, index: int, data: memoryview) -> None:
        """Writes a whole page."""

    @abstractmethod
    def footprints(self) -> list[Footprint]:
        """Where each page lies."""

    def shares_memory(self) -> bool:
        """Whether two pages have a byte in common, so that one would be written over the other."""
        return shares_memory(self.footprints())


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of a caller's memory: `count` pages of `nbytes`.

    `name` is the parameter's, for errors. `is_one_page`: the object is a page, not a batch.
    """

    name: str
    count: int
    nbytes: int
    writable: bool
    is_one_page: bool = False


class FlatRows(Rows):
    """Pages in one piece of memory, one after another or at `ids`."""

    def __init__(
        self,
        view: memoryview,
        nbytes: int,
        ids: Sequence[int] | None = None,
        *,
        address: int | None = None,
    ) -> None:
        self._view = view
        self._nbytes = nbytes
        self._ids = ids
        self._base = address_of(view) if address is None else address
        self._places = None if ids is None else np.array(ids, np.int64)

    def address(self, index: int) -> int:
        return self._base + (index if self._ids is None else self._ids[index]) * self._nbytes

    def addresses(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        places = indices if self._places is None else self._places[indices]
        found: NDArray[np.int64] = places * self._nbytes + self._base
        return found

    def direct(self, index: int) -> memoryview:
        start = (index if self._ids is None else self._ids[index]) * self._nbytes
        return self._view[start : start + self._nbytes]

    def load(self, index: int) -> memoryview:
        return memoryview(bytearray(self.direct(index)))

    def store(self, index: int, data: memoryview) -> None:
        self.direct(index)[:] = data

    def footprints(self) -> list[Footprint]:
        base = self._base
        places = range(len(self._view) // self._nbytes) if self._ids is None else self._ids
        return [
            Footprint(base + place * self._nbytes, (self._nbytes,), (1,), 1) for place in places
        ]

    def shares_memory(self) -> bool:
        return False  # one after another, and no place is given twice


class ArrayRows(Rows):
    """Pages along the first dimension of an ndarray, whatever its strides."""

    def __init__(self, array: np.ndarray[Any, Any], ids: Sequence[int] | None = None) -> None:
        self._array = array
        self._ids = ids

    def direct(self, index: int) -> memoryview | None:
        row = self._row(index)
        return _flat(row) if row.flags.c_contiguous else None

    def load(self, index: int) -> memoryview:
        return _flat(self._row(index).copy(order="C"))

    def store(self, index: int, data: memoryview) -> None:
        row = self._row(index)
        row[...] = np.frombuffer(data, row.dtype).reshape(row.shape)

    def footprints(self) -> list[Footprint]:
        count = len(self._array if self._ids is None else self._ids)
        return [Footprint.of_array(self._row(index)) for index in range(count)]

    def shares_memory(self) -> bool:
        return not Footprint.of_array(self._array).is_nested() and super().shares_memory()

    def _row(self, index: int) -> np.ndarray[Any, Any]:
        place = index if self._ids is None else self._ids[index]
        return self._array[place : place + 1]


class PageRows(Rows):
    """Pages that lie each in an object of its own."""

    def __init__(self, pages: Sequence[Rows]) -> None:
        self._pages = pages

    def direct(self, index: int) -> memoryview | None:
        return self._pages[index].direct(0)

    def load(self, index: int) -> memoryview:
        return self._pages[index].load(0)

    def store(self, index: int, data: memoryview) -> None:
        self._pages[index].store(0, data)

    def footprints(self) -> list[Footprint]:
        return [page.footprints()[0] for page in self._pages]


class Allocated(Rows):
    """New memory, for each page when it is first asked for: a miss takes none."""

    def __init__(self, request: Request) -> None:
        self._nbytes = request.nbytes
        self.pages: list[bytearray | None] = [None] * request.count

    def direct(self, index: int) -> memoryview:
        page = self.pages[index]
        if page is None:
            page = self.pages[index] = bytearray(self._nbytes)
        return memoryview(page)

    def load(self, index: int) -> memoryview:
        return memoryview(bytearray(self.direct(index)))

    def store(self, index: int, data: memoryview) -> None:
        self.direct(index)[:] = data

    def footprints(self) -> list[Footprint]:
        return []  # the memory is not there yet

    def shares_memory(self) -> bool:
        return False


def rows_of_array(array: np.ndarray[Any, Any], request: Request, at: object = None) -> Rows:
    """The pages of an ndarray. Raises PageSizeError."""
    if array.dtype.hasobject:
        raise PageSizeError(f"{request.name} is an array of objects", remedy=_FORMS)
    if request.writable and not array.flags.writeable:
        raise _read_only(request)
    ids = None if at is None else page_ids(at, len(array) if array.ndim else 0, request)
    by_row = row_shape(request, array.shape, array.nbytes, is_pool=ids is not None)
    if array.flags.c_contiguous:
        address = int(array.ctypes.data)
        return FlatRows(_flat(array), request.nbytes, ids, address=address)
    if not by_row:
        raise _not_in_rows(request, array.shape)
    return ArrayRows(array, ids)


def rows_of_buffer(buffer: Buffer, request: Request, at: object = None) -> Rows:
    """The pages of anything with the buffer protocol. Raises PageSizeError."""
    try:
        view = memoryview(buffer)
    except TypeError:
        raise PageSizeError(f"{request.name} is a {type(buffer).__name__}", remedy=_FORMS) from None
    if request.writable and view.readonly:
        raise _read_only(request)
    if not view.c_contiguous:
        array = np.asarray(view)
        return rows_of_array(array[None] if request.is_one_page else array, request, at)
    ids = None
    if at is not None:
        ids = page_ids(at, view.nbytes // request.nbytes, request)
        if view.nbytes % request.nbytes:
            raise size_error(request, "its size", view.nbytes, request.nbytes)
    elif view.nbytes != request.count * request.nbytes:
        raise size_error(request, "its size", view.nbytes, request.count * request.nbytes)
    return FlatRows(view.cast("B") if view.nbytes else view, request.nbytes, ids)


def row_shape(
    request: Request, shape: Sequence[int], nbytes: int, *, is_pool: bool = False
) -> bool:
    """Whether the first dimension counts the pages; False when only an equal cut of the whole does.

    Raises PageSizeError when the memory does not hold pages of this size either way.
    """
    rows = shape[0] if shape else 0
    if is_pool:
        have = nbytes // rows if rows else 0
        if have != request.nbytes:
            raise size_error(request, "one row of the pool", have, request.nbytes)
        return True
    if rows == request.count and nbytes != request.count * request.nbytes:
        raise size_error(request, "page 0", nbytes // rows if rows else 0, request.nbytes)
    if nbytes != request.count * request.nbytes:
        what = f"its shape {tuple(shape)}"
        raise size_error(request, what, nbytes, request.count * request.nbytes)
    return rows == request.count


def page_ids(at: object, pool_pages: int, request: Request) -> list[int]:
    """`at` as a list, one place in the pool a page. Raises PageSizeError naming the index."""
    remedy = "pass the numbers of pages of the pool, counted from 0"
    if is_tensor(at) and at.is_meta:
        raise PageSizeError("at is a tensor on device meta, which has no numbers", remedy=remedy)
    given = at.tolist() if is_tensor(at) or isinstance(at, np.ndarray) else at
    if not isinstance(given, Iterable):
        raise PageSizeError(f"at is {given!r}", remedy=remedy)
    places: list[Any] = list(given)
    if len(places) != request.count:
        raise size_error(request, "at", len(places), request.count, unit="page ids")
    if set(map(type, places)) == {int} and min(places) >= 0 and max(places) < pool_pages:
        ids = places
    else:
        ids = _checked_ids(places, pool_pages, request)
    if request.writable and len(set(ids)) != len(ids):
        raise PageSizeError(
            "at names a page of the pool twice", remedy="give each key a page of its own"
        )
    return ids


def _checked_ids(places: list[Any], pool_pages: int, request: Request) -> list[int]:
    """Whole numbers of any kind. Raises PageSizeError naming the index."""
    ids = []
    for index, place in enumerate(places):
        try:
            number = operator.index(place)  # once: what was looked at is what is used
        except (TypeError, ValueError):
            number = -1
        if not 0 <= number < pool_pages:
            raise PageSizeError(
                f"at[{index}] is {place!r}, {request.name} has {pool_pages} pages",
                remedy="pass the numbers of pages of the pool, counted from 0",
            )
        ids.append(number)
    return ids


def size_error(
    request: Request, what: str, have: int, need: int, *, unit: str = "bytes"
) -> PageSizeError:
    return PageSizeError(
        f"{request.name}: {what} has {have} {unit}, needed are {need} "
        f"({request.count} pages of {request.nbytes} bytes)",
        remedy="pass the pages of this shard alone, each of layout.raw_bytes bytes",
    )


def _read_only(request: Request) -> PageSizeError:
    return PageSizeError(
        f"{request.name} is read-only memory", remedy="pass memory that can be written"
    )


def _not_in_rows(request: Request, shape: Sequence[int]) -> PageSizeError:
    return PageSizeError(
        f"{request.name} of shape {tuple(shape)} is strided and {prod(shape[:1])} rows are not "
        f"{request.count} pages",
        remedy="make the first dimension the pages, or the memory contiguous",
    )


def _flat(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
