"""System calls of a DirectFile that are counted and fail when told to, and files to try them on."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.tiers import direct_file
from kvtier.tiers.direct_file import ALIGN_BYTES, DirectFile, DirectMode, FileCalls, aligned_buffer

FILE_BYTES = 64 * ALIGN_BYTES


class CountedCalls(FileCalls):
    """`log`: the name of every call; `moved`: (address, bytes) of every part of the last one.

    `faults` maps a call's name to an errno, raised at each such call while it is there. `shorten`
    maps a count of bytes to the count that a read or write then really moves. With `claim` they
    move nothing and return that.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.moved: list[tuple[int, int]] = []
        self.faults: dict[str, int] = {}
        self.shorten: Callable[[int], int] = lambda count: count
        self.claim: int | None = None

    def count(self, name: str) -> int:
        return self.log.count(name)

    def _called(self, name: str) -> None:
        self.log.append(name)
        if name in self.faults:
            raise OSError(self.faults[name], os.strerror(self.faults[name]))

    def _parts(self, parts: Sequence[memoryview]) -> list[memoryview]:
        self.moved = [(address(part), part.nbytes) for part in parts]
        left = self.shorten(sum(part.nbytes for part in parts))
        taken = []
        for part in parts:
            taken.append(part[: min(left, part.nbytes)])
            left -= taken[-1].nbytes
        return [part for part in taken if part.nbytes]

    def open(self, path: Path, flags: int) -> int:
        self._called("open")
        return super().open(path, flags)

    def set_direct(self, fd: int, is_direct: bool) -> None:
        self._called("direct" if is_direct else "buffered")
        super().set_direct(fd, is_direct)

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._called("allocate")
        super().allocate(fd, size_bytes)

    def pwritev(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        self._called("pwritev")
        if self.claim is not None:
            return self.claim
        taken = self._parts(parts)
        return super().pwritev(fd, taken, offset) if taken else 0

    def preadv(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        self._called("preadv")
        if self.claim is not None:
            return self.claim
        taken = self._parts(parts)
        return super().preadv(fd, taken, offset) if taken else 0

    def fdatasync(self, fd: int) -> None:
        self._called("fdatasync")
        super().fdatasync(fd)


class SparseCalls(CountedCalls):
    """Files that take no disk space where nothing was written."""

    def allocate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)


def aligned(data: bytes, shift: int = 0) -> memoryview:
    """The bytes at an address that is `shift` past a multiple of 4096."""
    view = aligned_buffer(len(data) + shift)[shift:]
    view[:] = data
    return view


def random_bytes(count: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(count)


def new_file(path, *, mode=DirectMode.AUTO, calls=direct_file.SYSTEM_CALLS, size=FILE_BYTES):
    file = DirectFile.open(path, write=True, create=True, mode=mode, calls=calls)
    file.allocate(size)
    return file


def needs_direct(file):
    if not file.is_direct:
        file.close()
        pytest.skip(f"the file system of the test directory has no O_DIRECT: {file.reason}")


def address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
