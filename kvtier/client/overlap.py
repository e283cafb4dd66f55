"""Whether the pages of a batch share memory, told from their addresses, shapes and strides alone.

A page that is written over by another one would count as a hit and hold that other page's bytes.
Pages that interleave without sharing a byte (`pool[:, i]` of a pool with the layers first) are
fine, and told apart without looking at every number. Where telling would take more than
PIECES_MAX pieces the answer is yes: better refused than wrong.

Pure functions on numbers; no memory is read, so that they serve a GPU's addresses too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["Footprint", "shares_memory"]

#: Contiguous pieces that are compared one by one when nothing simpler tells: some 0.1 s of work.
PIECES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of one page, or of a whole pool of them. `strides` are in bytes.

    `space` names the address space: "cpu", or a device.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    space: str = "cpu"

    @classmethod
    def of_array(cls, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Footprint:
        return cls(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def bounds(self) -> tuple[int, int]:
        """The lowest address and the one after the highest."""
        spans = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low = sum(span for span in spans if span < 0)
        return self.address + low, self.address + sum(spans) - low + self.itemsize

    def is_nested(self, *more: tuple[int, int]) -> bool:
        """Whether each dimension steps over all smaller ones: then no two numbers share a byte.

        `more` are further dimensions as (size, stride). False says nothing.
        """
        dims = [*zip(self.shape, self.strides, strict=True), *more]
        reach = self.itemsize
        for size, stride in sorted(dims, key=lambda dim: abs(dim[1])):
            if size > 1:
                if abs(stride) < reach:
                    return False
                reach += (size - 1) * abs(stride)
        return True

    def pieces(self) -> tuple[npt.NDArray[np.int64], int]:
        """Where its contiguous pieces begin, and how long each of them is."""
        length, outer = self.itemsize, []
        for size, stride in sorted(
            zip(self.shape, self.strides, strict=True), key=lambda dim: abs(dim[1])
        ):
            if size > 1 and stride == length:
                length *= size
            elif size > 1:
                outer.append((size, stride))
        starts = np.array([self.address], np.int64)
        for size, stride in outer:
            starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return starts, length

    def piece_count(self) -> int:
        """How many pieces `pieces` gives."""
        length, count = self.itemsize, 1
        for size, stride in sorted(
            zip(self.shape, self.strides, strict=True), key=lambda dim: abs(dim[1])
        ):
            if size > 1 and stride == length:
                length *= size
            elif size > 1:
                count *= size
        return count


def shares_memory(pages: Sequence[Footprint]) -> bool:
    """Whether two of them, or one of them twice, have a byte in common."""
    real = [page for page in pages if page.nbytes]
    if any(not page.is_nested() and _pieces_meet([page]) for page in real):
        return True
    return any(_cluster_meets(cluster) for cluster in _clusters(real))


def _clusters(pages: list[Footprint]) -> Iterator[list[Footprint]]:
    """Groups of two or more whose bounds meet; pages of different groups cannot."""
    for _, same in groupby(sorted(pages, key=lambda page: page.space), lambda page: page.space):
        bounded = sorted(((page.bounds(), page) for page in same), key=lambda pair: pair[0])
        cluster: list[Footprint] = []
        end = 0
        for (low, high), page in bounded:
            if cluster and low >= end:
                if len(cluster) > 1:
                    yield cluster
                cluster = []
            cluster.append(page)
            end = max(end, high)
        if len(cluster) > 1:
            yield cluster


def _cluster_meets(cluster: list[Footprint]) -> bool:
    first = cluster[0]
    alike = all(
        (page.shape, page.strides, page.itemsize) == (first.shape, first.strides, first.itemsize)
        for page in cluster
    )
    if alike:
        # Views of one pool: the places of the pages are then one more dimension of it.
        addresses = sorted(page.address for page in cluster)
        steps = [after - before for before, after in pairwise(addresses)]
        if min(steps) == 0:
            return True
        step = math.gcd(*steps)
        if first.is_nested(((addresses[-1] - addresses[0]) // step + 1, step)):
            return False
    return _pieces_meet(cluster)


def _pieces_meet(pages: Sequence[Footprint]) -> bool:
    """The exact answer, from every contiguous piece; True where there are too many."""
    if sum(page.piece_count() for page in pages) > PIECES_MAX:
        return True
    made = [page.pieces() for page in pages]
    starts = np.concatenate([start for start, _ in made])
    ends = np.concatenate([start + length for start, length in made])
    order = np.argsort(starts, kind="stable")
    return bool((starts[order][1:] < ends[order][:-1]).any())
