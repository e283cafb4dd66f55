"""The files of one device directory: opened when they are needed, so many kept open, and whether
their I/O goes past the page cache.

Promise: a file stays open for as long as somebody has it borrowed, whatever happens to its name.
Once one file was refused O_DIRECT, later ones are not asked again; `is_direct` and `reason` say so.

Errors: OSError. Thread rule: any thread; the lock is never held during I/O.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from kvtier.tiers.direct_file import DirectFile, DirectMode, FileCalls, aligned_buffer

__all__ = ["OPEN_FILES_MAX", "DeviceFiles"]

log = logging.getLogger(__name__)

#: Files that a device keeps open for the next use; the one used longest ago is closed for another.
OPEN_FILES_MAX = 64

_PROBE_BYTES = 8192


class DeviceFiles:
    """`reason`: why not direct although `mode` would have it; "" if as asked."""

    def __init__(self, directory: Path, *, mode: DirectMode, calls: FileCalls) -> None:
        self.is_direct = mode is not DirectMode.OFF
        self.reason = ""
        self._directory = directory
        self._mode = mode
        self._calls = calls
        self._lock = threading.Lock()
        self._files: OrderedDict[str, DirectFile] = OrderedDict()
        self._drops = 0
        self._is_closed = False

    @contextlib.contextmanager
    def borrow(self, name: str) -> Iterator[DirectFile]:
        """The file of that name, for reading and writing."""
        with self._lock:
            self._refuse_if_closed()
            drops = self._drops
            file = self._files.get(name)
            if file is not None:
                self._files.move_to_end(name)
                file.retain()
        if file is None:
            file = self._opened(name, drops)
        try:
            yield file
        finally:
            self._note(file)
            file.release()

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[DirectFile]:
        """A new file of that name, closed at the end; an old one is removed."""
        path = self._directory / name
        path.unlink(missing_ok=True)
        mode = self._mode
        with DirectFile.open(path, write=True, create=True, mode=mode, calls=self._calls) as file:
            yield file
            self._note(file)

    def read_block(self, name: str, nbytes: int) -> memoryview:
        """The first bytes of a file that is not kept open."""
        block = aligned_buffer(nbytes)
        path = self._directory / name
        with DirectFile.open(path, write=False, mode=self._mode, calls=self._calls) as file:
            file.read_at(0, block)
            self._note(file)
        return block

    def probe(self, name: str) -> None:
        """Writes a new file of that name, syncs it, reads it back, compares, and removes it."""
        written, found = aligned_buffer(_PROBE_BYTES), aligned_buffer(_PROBE_BYTES)
        written[:] = secrets.token_bytes(_PROBE_BYTES)
        try:
            with self.new(name) as file:
                file.allocate(_PROBE_BYTES)
                file.write_at(0, [written])
                file.sync()
                file.read_at(0, found)
        finally:
            with contextlib.suppress(OSError):
                (self._directory / name).unlink()
        if found != written:
            raise OSError(errno.EIO, "a probe file did not read back as it was written")

    def drop(self, name: str) -> None:
        """The name is about to mean another file, or none. What is under way goes on."""
        with self._lock:
            self._drops += 1
            file = self._files.pop(name, None)
        if file is not None:
            file.release()

    def close(self) -> None:
        """Nothing can be borrowed any more; what is borrowed is closed when it comes back."""
        with self._lock:
            self._is_closed = True
            files = list(self._files.values())
            self._files.clear()
        for file in files:
            file.release()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "the device is closed")

    def _opened(self, name: str, drops: int) -> DirectFile:
        """Retained for the caller, and kept for the next, unless a drop came in between."""
        path = self._directory / name
        try:
            opened = DirectFile.open(path, write=True, mode=self._mode, calls=self._calls)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            # It can be read; until a `drop` a write of it is EROFS.
            opened = DirectFile.open(path, write=False, mode=self._mode, calls=self._calls)
        surplus = []
        with self._lock:
            file = opened
            if self._is_closed or drops != self._drops:
                surplus.append(opened)
            elif (file := self._files.setdefault(name, opened)) is not opened:
                surplus.append(opened)  # another thread was faster
            file.retain()
            while len(self._files) > OPEN_FILES_MAX:
                surplus.append(self._files.popitem(last=False)[1])
        for other in surplus:
            other.release()
        return file

    def _note(self, file: DirectFile) -> None:
        if file.is_direct or self._mode is DirectMode.OFF:
            return
        self._mode = DirectMode.OFF
        self.reason = file.reason
        self.is_direct = False
        extra = {"path": str(self._directory), "reason": file.reason}
        log.warning("nvme.direct_io.refused", extra=extra)
