"""A file for I/O past the page cache, with buffers that need not be aligned.

Promise: a call moves all its bytes or raises OSError. Under O_DIRECT, blocks that lie in the
caller's memory at an aligned address go to and from the device as they are, in one system call
together with the rest; only the other blocks are copied. Where O_DIRECT is refused, the file goes
on through the page cache if its mode allows that, and says so: `is_direct`, `reason`.

The file must exist in full (`allocate`) before it is written: under O_DIRECT a write is whole
blocks, so one past an unaligned end leaves the file longer, up to the block's end. A write that
begins or ends inside a block reads that block first and writes it back; two of these at once in one
block lose one of them.

Thread rule: any thread. The descriptor is closed when `close` was called and the last call in the
file has ended, so a late call never meets a descriptor that means another file by then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from kvtier.tiers.base import Buffer, flat_bytes

__all__ = [
    "ALIGN_BYTES",
    "SYSTEM_CALLS",
    "DirectFile",
    "DirectMode",
    "DirectRefused",
    "FileCalls",
    "aligned_buffer",
]

#: Offset, length and address of direct I/O are multiples of this: enough for devices with blocks
#: of 512 bytes and of 4 KiB.
ALIGN_BYTES = 4096

#: The most buffers in one system call (IOV_MAX of Linux).
_PARTS_MAX = 1024
#: A device may move less than a block and have its reason later; one that goes on so is broken.
_STALLS_MAX = 8
_REFUSALS = frozenset((errno.EINVAL, errno.EOPNOTSUPP))


class DirectMode(Enum):
    AUTO = auto()
    """O_DIRECT where the file system takes it, else buffered."""
    OFF = auto()
    """Buffered."""
    REQUIRED = auto()
    """O_DIRECT, or an error."""


class DirectRefused(OSError):
    """The file system does not take O_DIRECT, and the mode is REQUIRED. errno is EINVAL."""


class FileCalls:
    """The system calls of a DirectFile: where a test counts them, or makes them fail."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags, 0o600)

    def set_direct(self, fd: int, is_direct: bool) -> None:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)

    def allocate(self, fd: int, size_bytes: int) -> None:
        os.posix_fallocate(fd, 0, size_bytes)

    def pwritev(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, parts, offset)

    def preadv(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, parts, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)


SYSTEM_CALLS = FileCalls()


def aligned_buffer(nbytes: int) -> memoryview:
    """`nbytes` of zeros, writable, at a multiple of 4096; unmapped with the last view of it."""
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview(mmap.mmap(-1, nbytes))


class DirectFile:
    """See the module docstring; made by `open`. `reason` says why not direct, "" if as asked."""

    def __init__(self, path: Path, fd: int, *, mode: DirectMode, calls: FileCalls) -> None:
        self.path = path
        self.is_direct = False
        self.reason = ""
        self.is_writable = True
        self._fd = fd
        self._mode = mode
        self._calls = calls
        self._lock = threading.Lock()
        self._is_closed = False
        self._holders = 1  # the open file itself is one

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        write: bool,
        create: bool = False,
        mode: DirectMode = DirectMode.AUTO,
        calls: FileCalls = SYSTEM_CALLS,
    ) -> Self:
        """`create`: the file must not exist yet; it is made with mode 0600, empty.

        Raises OSError (DirectRefused), with nothing left open; a file that `create` made may be
        left.
        """
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a fifo must not hold us up
        flags |= os.O_RDWR if write else os.O_RDONLY
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        file = cls(path, calls.open(path, flags), mode=mode, calls=calls)
        file.is_writable = write
        try:
            if mode is not DirectMode.OFF:
                # Not at open(): that leaves a new, empty file behind when it refuses.
                try:
                    calls.set_direct(file._fd, True)
                    file.is_direct = True
                except OSError as error:
                    file._go_buffered(error, "open")
        except OSError:
            file.close()
            raise
        return file

    def allocate(self, size_bytes: int) -> None:
        """Takes all the disk space of a file of this size, which reads as zeros."""
        with self._held() as fd:
            self._calls.allocate(fd, size_bytes)

    def write_at(self, offset: int, parts: Sequence[Buffer]) -> None:
        """Write `parts` one after another from byte `offset`."""
        views = [view for part in parts if (view := flat_bytes(part)).nbytes]
        if not views:
            return
        if not self.is_writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        with self._held() as fd:
            if self.is_direct:
                try:
                    start, runs = self._whole_blocks(fd, offset, views)
                    self._move(self._calls.pwritev, fd, runs, start)
                    return
                except OSError as error:
                    self._go_buffered(error, "write")
            self._move(self._calls.pwritev, fd, views, offset)

    def read_at(self, offset: int, into: Buffer) -> None:
        """Fill all of `into` from byte `offset`. The end of the file before that is EIO."""
        target = flat_bytes(into)
        if not target.nbytes:
            return
        with self._held() as fd:
            if self.is_direct:
                try:
                    self._read_direct(fd, offset, target)
                    return
                except OSError as error:
                    self._go_buffered(error, "read")
            self._move(self._calls.preadv, fd, [target], offset)

    def sync(self) -> None:
        """fdatasync: what was written and the file's size survive a power cut."""
        with self._held() as fd:
            self._calls.fdatasync(fd)

    def status(self) -> os.stat_result:
        with self._held() as fd:
            return os.fstat(fd)

    def close(self) -> None:
        """Again does nothing. All other calls raise EBADF after it; those under way go on."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.release()

    def retain(self) -> None:
        """One holder more: the descriptor stays open until the last has called `release`.

        The first holder is who opened the file; it calls either `close`, which ends the file for
        all, or `release`, which leaves it to the others.
        """
        with self._lock:
            if self._is_closed or self._holders == 0:
                raise OSError(errno.EBADF, "the file is closed")
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            is_last = self._holders == 0
        if is_last:
            with contextlib.suppress(OSError):  # what must be safe was synced before
                os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _held(self) -> Iterator[int]:
        self.retain()
        try:
            yield self._fd
        finally:
            self.release()

    def _go_buffered(self, error: OSError, during: str) -> None:
        """Returns if the call that got `error` may be made again, buffered; else raises."""
        if error.errno not in _REFUSALS:
            raise error
        if self._mode is DirectMode.REQUIRED:
            words = f"O_DIRECT is required and was refused ({during} of {self.path.name})"
            raise DirectRefused(errno.EINVAL, words) from error
        with self._lock:
            if self.is_direct:
                self._calls.set_direct(self._fd, False)
                self.is_direct = False
            name = errno.errorcode.get(error.errno or 0, "?")
            self.reason = self.reason or f"O_DIRECT was refused ({during}: {name})"

    def _whole_blocks(
        self, fd: int, offset: int, views: list[memoryview]
    ) -> tuple[int, list[memoryview]]:
        """(start, aligned runs) that write `views` at `offset` and leave their neighbours be."""
        end = offset + sum(view.nbytes for view in views)
        start, stop = _round_down(offset), _round_up(end)
        pieces = views
        if start < offset:
            pieces = [self._block(fd, start)[: offset - start], *pieces]
        if end < stop:
            last = stop - ALIGN_BYTES
            pieces = [*pieces, self._block(fd, last)[end - last :]]
        return start, _aligned_runs(pieces)

    def _block(self, fd: int, offset: int) -> memoryview:
        """The block at `offset`; zeros past the end of the file."""
        block = aligned_buffer(ALIGN_BYTES)
        wanted = min(ALIGN_BYTES, max(0, os.fstat(fd).st_size - offset))
        self._move(self._calls.preadv, fd, [block], offset, wanted=wanted)
        return block

    def _read_direct(self, fd: int, offset: int, target: memoryview) -> None:
        start = _round_down(offset)
        size = _round_up(offset + target.nbytes) - start
        wanted = offset - start + target.nbytes  # the file may end inside the last block
        lead = -offset % ALIGN_BYTES
        body = _round_down(max(0, target.nbytes - lead))
        if body == 0 or (_address(target) + lead) % ALIGN_BYTES:
            bounce = aligned_buffer(size)
            self._move(self._calls.preadv, fd, [bounce], start, wanted=wanted)
            target[:] = bounce[offset - start : wanted]
            return
        first = aligned_buffer(ALIGN_BYTES if lead else 0)
        last = aligned_buffer(size - first.nbytes - body)
        runs = [run for run in (first, target[lead : lead + body], last) if run.nbytes]
        self._move(self._calls.preadv, fd, runs, start, wanted=wanted)
        target[:lead] = first[first.nbytes - lead :]
        target[lead + body :] = last[: target.nbytes - lead - body]

    def _move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        fd: int,
        runs: list[memoryview],
        offset: int,
        *,
        wanted: int = -1,
    ) -> None:
        """Make `call` until it has moved all of `runs`, or the first `wanted` bytes of them."""
        total = sum(run.nbytes for run in runs) if wanted < 0 else wanted
        done = stalls = 0
        while done < total:
            count = call(fd, runs[:_PARTS_MAX], offset + done)
            if count <= 0 or stalls == _STALLS_MAX:
                words = f"{self.path.name} moved {done + count} of {total} bytes at {offset}"
                raise OSError(errno.EIO, words)
            if done + count >= total:
                return
            # Direct I/O goes on at a block's start: the bytes of a block in part are moved again.
            step = _round_down(count) if self.is_direct else count
            stalls += step == 0
            done += step
            runs = _without(runs, step)


def _aligned_runs(pieces: list[memoryview]) -> list[memoryview]:
    """`pieces`, together whole blocks, as runs of whole blocks at aligned addresses.

    Blocks that lie so in one piece are not copied.
    """
    runs: list[memoryview] = []
    rest: list[memoryview] = []  # since the last block that needs no copy
    position = 0
    for piece in pieces:
        lead = -position % ALIGN_BYTES
        body = _round_down(max(0, piece.nbytes - lead))
        position += piece.nbytes
        if body == 0 or (_address(piece) + lead) % ALIGN_BYTES:
            rest.append(piece)
            continue
        rest.append(piece[:lead])
        runs += _copied(rest)
        runs.append(piece[lead : lead + body])
        rest = [piece[lead + body :]]
    return runs + _copied(rest)


def _copied(pieces: list[memoryview]) -> list[memoryview]:
    total = sum(piece.nbytes for piece in pieces)
    if total == 0:
        return []
    buffer = aligned_buffer(total)
    position = 0
    for piece in pieces:
        buffer[position : position + piece.nbytes] = piece
        position += piece.nbytes
    return [buffer]


def _without(runs: list[memoryview], count: int) -> list[memoryview]:
    """`runs` but for their first `count` bytes."""
    for number, run in enumerate(runs):
        if count < run.nbytes:
            return [run[count:], *runs[number + 1 :]]
        count -= run.nbytes
    return []


def _address(view: memoryview) -> int:
    # numpy tells it of read-only memory too, ctypes does not.
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def _round_down(count: int) -> int:
    return count - count % ALIGN_BYTES


def _round_up(count: int) -> int:
    return count + -count % ALIGN_BYTES
