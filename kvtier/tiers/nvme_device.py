"""One directory of the NVMe tier: its identity and its segment files.

    device            sealed: which daemon directory it belongs to, and its number there
    segment-NNNNNNNN  see nvme_segment.py; made whole, synced, and only then named
    *.tmp             what a start or stop left half made; removed when the device is opened

Promise: a file is used only if it is the segment that its name says, of this device, whole; others
are named in `rejected` and left alone until their number is made again or removed. Files of other
people are named in `foreign` and never touched. A failed `create_segment` leaves nothing behind.
A directory that was removed, or replaced by another, is an error and not a place to lose pages in.

Thread rule: any thread; all methods may block for as long as the device does, the properties never
do. `segments` is replaced, not changed: what a caller holds stays as it is.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.core.page import Tier
from kvtier.errors import CorruptRecord, InvalidConfigValue, TierIOError
from kvtier.tiers.base import Buffer, TierOperation, tier_io_error
from kvtier.tiers.direct_file import (
    SYSTEM_CALLS,
    DirectFile,
    DirectMode,
    DirectRefused,
    FileCalls,
    aligned_buffer,
)
from kvtier.tiers.nvme_directory import (
    PROBE_NAME,
    DeviceDirectory,
    DeviceIdentity,
    FileId,
    file_id_of,
    is_ours,
    open_directory,
)
from kvtier.tiers.nvme_files import DeviceFiles
from kvtier.tiers.nvme_geometry import DEVICE_SLABS_MAX
from kvtier.tiers.nvme_segment import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
    segment_name,
    segment_number,
)
from kvtier.tiers.sealed_file import TEMPORARY_SUFFIX

__all__ = ["NvmeDevice", "open_device"]

log = logging.getLogger(__name__)

#: The medium has lost what was there: this file is bad. Any other error says nothing about it.
_LOST: Final = frozenset((errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA))
#: No new file can be made: the segments that exist can be read all the same.
_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS))


def open_device(
    path: Path,
    *,
    directory_id: bytes,
    number: int,
    segment_bytes: int,
    mode: DirectMode = DirectMode.AUTO,
    create: bool = True,
    discard: bool = False,
    calls: FileCalls = SYSTEM_CALLS,
) -> NvmeDevice:
    """Opens the device of this number and finds its segments; see `open_directory` for `create`
    and `discard`.

    Raises DirectoryError (for the operator), InvalidConfigValue (O_DIRECT is required and refused),
    TierIOError (the device; it may work later).
    """
    identity = DeviceIdentity(directory_id=directory_id, number=number)
    try:
        directory = open_directory(path, identity, create=create, discard=discard)
        device = NvmeDevice(directory, identity, segment_bytes, mode=mode, calls=calls)
        try:
            device.find_segments()
        except OSError:
            device.close()
            raise
    except DirectRefused as error:
        raise InvalidConfigValue(
            f'nvme.direct_io = "required", but {path} refuses O_DIRECT: {error.strerror}',
            remedy='set nvme.direct_io to "auto", or name a directory on another file system',
        ) from error
    except OSError as error:
        raise _failed(path, TierOperation.OPEN, error) from error
    log.info(
        "nvme.device.opened",
        extra={
            "path": str(path),
            "segments": len(device.segments),
            "rejected": len(device.rejected),
            "direct": device.is_direct,
        },
    )
    return device


class NvmeDevice:
    """See the module docstring; made by `open_device`. Local numbers are 0 to 2^20 - 1."""

    def __init__(
        self,
        directory: DeviceDirectory,
        identity: DeviceIdentity,
        segment_bytes: int,
        *,
        mode: DirectMode,
        calls: FileCalls,
    ) -> None:
        self.path = directory.path
        self.number = identity.number
        self.segment_bytes = segment_bytes
        self.directory = directory
        self._directory_id = identity.directory_id
        self._files = DeviceFiles(directory.path, mode=mode, calls=calls)
        self._segments: frozenset[int] = frozenset()
        self._rejected: dict[int, str] = {}
        self._unreadable: frozenset[int] = frozenset()
        self._named: dict[int, FileId] = {}  # the files of the segments; replaced, not changed
        self._foreign: tuple[str, ...] = ()
        self._lock = threading.Lock()  # for the set below
        self._unsynced: set[int] = set()
        # One at a time: so that a sync does not return before what an earlier one took up is safe.
        self._sync_lock = threading.Lock()
        self._change_lock = threading.Lock()  # making, removing, probing

    @property
    def is_direct(self) -> bool:
        """All I/O so far went past the page cache."""
        return self._files.is_direct

    @property
    def io_reason(self) -> str:
        """Why not direct although the mode would have it; "" if as asked."""
        return self._files.reason

    @property
    def segments(self) -> frozenset[int]:
        """The local numbers of the segments in use."""
        return self._segments

    @property
    def rejected(self) -> list[str]:
        """Files with a segment's name that are not that segment, and why; not in use."""
        return [f"{segment_name(local)}: {why}" for local, why in sorted(self._rejected.items())]

    @property
    def rejected_segments(self) -> frozenset[int]:
        """Their local numbers. Their files take up disk space until `remove_segment`."""
        return frozenset(self._rejected)

    @property
    def unreadable_segments(self) -> frozenset[int]:
        """Of them, those that could not be read at all; at another time they may be."""
        return self._unreadable & self._rejected.keys()

    @property
    def foreign(self) -> tuple[str, ...]:
        """Names in the directory that are none of kvtier's, as found when it was opened."""
        return self._foreign

    def find_segments(self) -> None:
        """For `open_device` and `look_again`: looks at every file. Raises OSError."""
        names = self.directory.names()
        self._foreign = tuple(name for name in names if not is_ours(name))
        found, rejected, unreadable = {}, {}, set()
        for local in [local for name in names if (local := segment_number(name)) is not None]:
            try:
                file_id = file_id_of(self.path / segment_name(local))
                why = self._difference(local)
            except OSError as error:
                if error.errno not in _LOST:
                    raise
                why = f"it cannot be read: {error.strerror}"
                unreadable.add(local)
            if why:
                rejected[local] = why
                words = {"path": str(self.path / segment_name(local)), "reason": why}
                log.warning("nvme.segment.rejected", extra=words)
            else:
                found[local] = file_id
        self._segments, self._rejected, self._named = frozenset(found), rejected, found
        self._unreadable = frozenset(unreadable)
        if not found and self._files.is_direct:
            # Nothing was read, so nothing tells yet whether O_DIRECT works here.
            try:
                self._files.probe(PROBE_NAME)
            except OSError as error:
                if error.errno not in _FULL:
                    raise

    def read_at(self, local: int, offset: int, into: Buffer) -> None:
        """Fill `into` from `offset` bytes after the start of the slots. Raises OSError."""
        with self._borrow(local) as file:
            file.read_at(SEGMENT_HEADER_BYTES + offset, into)

    def write_at(self, local: int, offset: int, parts: Sequence[Buffer]) -> None:
        """Write `parts` from `offset` bytes after the start of the slots. Raises OSError."""
        with self._borrow(local) as file:
            _check_named(file)
            try:
                file.write_at(SEGMENT_HEADER_BYTES + offset, parts)
            finally:
                with self._lock:
                    self._unsynced.add(local)

    def sync(self) -> None:
        """As TierDevice.sync, for this device.

        After an error, what was written since the last sync that returned may be lost in a power
        cut, even if a later one returns. Raises TierIOError.
        """
        with self._sync_lock:
            with self._lock:
                pending, self._unsynced = self._unsynced, set()
            try:
                self.directory.check_present()
                for local in sorted(pending & self._segments):
                    with self._borrow(local) as file:
                        _check_named(file)
                        file.sync()
            except OSError as error:
                with self._lock:
                    self._unsynced |= pending
                raise self.failed(TierOperation.SYNC, error) from error

    def create_segment(self, local: int) -> None:
        """Makes the segment's file, with all its disk space, durably; its slots read as zeros.

        A rejected file of this number gives way. Raises TierIOError, with nothing left behind.
        """
        with self._change_lock:
            try:
                self.directory.check_present()
                if local in self._segments or not 0 <= local < DEVICE_SLABS_MAX:
                    raise OSError(errno.EEXIST, f"{segment_name(local)} cannot be made")
                self._make_file(local)
            except OSError as error:
                raise self.failed(TierOperation.WRITE, error) from error
            self._forget_rejected(local)
            self._segments |= {local}

    def remove_segment(self, local: int) -> None:
        """Removes the segment's file, or the rejected file of this number, durably.

        Reads and writes under way go on and touch nothing else; their disk space comes back when
        they have ended. Raises TierIOError, and then the segment may be there or not.
        """
        with self._change_lock:
            try:
                self.directory.check_present()
                (self.path / segment_name(local)).unlink(missing_ok=True)
                self._forget_rejected(local)
                self._segments -= {local}
                self._files.drop(segment_name(local))
                with self._lock:
                    self._unsynced.discard(local)
                self.directory.sync()
            except OSError as error:
                raise self.failed(TierOperation.WRITE, error) from error

    def disk_bytes(self) -> int:
        """What the device's files take up on disk. Raises TierIOError."""
        try:
            return self.directory.disk_bytes()
        except OSError as error:
            raise self.failed(TierOperation.READ, error) from error

    def probe(self) -> None:
        """A small file is written, synced, read back, compared, removed. Raises TierIOError."""
        with self._change_lock:
            try:
                self.directory.check_present()
                self._files.probe(PROBE_NAME)
            except OSError as error:
                raise self.failed(TierOperation.WRITE, error) from error

    def check_files(self) -> None:
        """That the directory and every segment are still there by name: what is written to a file
        without one is lost, although it can be read as long as it is open. Raises TierIOError."""
        try:
            known = self._named
            self.directory.check_present()
            self.directory.keep_identity()
            others = self.directory.other({segment_name(n): known[n] for n in known})
            for local in sorted(self._segments):  # those of now: it may have been made meanwhile
                why = others.get(segment_name(local))
                if why and self._named.get(local) == known.get(local):
                    raise OSError(errno.ENOENT, why)
        except OSError as error:
            raise self.failed(TierOperation.READ, error) from error

    def look_again(self) -> None:
        """For a device that was away: which segments are there now. Raises TierIOError."""
        with self._change_lock:
            try:
                self.directory.check_present()
                for local in self._segments:
                    self._files.drop(segment_name(local))  # it may be open, and have lost its name
                self.find_segments()
            except OSError as error:
                raise self.failed(TierOperation.OPEN, error) from error

    def failed(
        self, operation: TierOperation, error: OSError, *, slot: int | None = None
    ) -> TierIOError:
        """The TierIOError for `error`, which names the device as well."""
        return _failed(self.path, operation, error, slot=slot)

    def close(self) -> None:
        """Closes what no call uses any more, the rest when its call ends; unlocks the directory."""
        self._files.close()
        self.directory.close()

    def _borrow(self, local: int) -> contextlib.AbstractContextManager[DirectFile]:
        if local not in self._segments:
            raise OSError(errno.ERANGE, f"{segment_name(local)} does not exist")
        return self._files.borrow(segment_name(local))

    def _difference(self, local: int) -> str:
        """Why the file of this number is not the segment it should be; "" if it is."""
        path = self.path / segment_name(local)
        wanted = self._header(local)
        if local >= DEVICE_SLABS_MAX:
            return "there is no segment of such a number"
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            return "it is not a regular file"
        file_bytes = SEGMENT_HEADER_BYTES + self.segment_bytes
        if found.st_size != file_bytes:
            return f"it has {found.st_size} bytes, not {file_bytes}"
        try:
            block = self._files.read_block(path.name, SEGMENT_HEADER_BYTES)
            return wanted.difference(decode_segment_header(block))
        except CorruptRecord as error:
            return str(error)

    def _header(self, local: int) -> SegmentHeader:
        return SegmentHeader(
            directory_id=self._directory_id,
            device=self.number,
            local=local,
            segment_bytes=self.segment_bytes,
        )

    def _make_file(self, local: int) -> None:
        path = self.path / segment_name(local)
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        header = aligned_buffer(SEGMENT_HEADER_BYTES)
        header[:] = encode_segment_header(self._header(local))
        path.unlink(missing_ok=True)
        try:
            with self._files.new(temporary.name) as file:
                file.allocate(SEGMENT_HEADER_BYTES + self.segment_bytes)
                file.write_at(0, [header])
                file.sync()
            temporary.replace(path)
            self.directory.sync()
            self._named = self._named | {local: file_id_of(path)}
        except OSError:
            for left in (temporary, path):
                with contextlib.suppress(OSError):
                    left.unlink()
            raise

    def _forget_rejected(self, local: int) -> None:
        self._rejected = {key: why for key, why in self._rejected.items() if key != local}


def _check_named(file: DirectFile) -> None:
    """Raises OSError (ENOENT) for a file that was deleted: what is written there is lost."""
    if file.status().st_nlink == 0:
        raise OSError(errno.ENOENT, f"{file.path.name} was deleted")


def _failed(
    path: Path, operation: TierOperation, error: OSError, *, slot: int | None = None
) -> TierIOError:
    # The file, where the system names one: rights may be missing to it alone.
    named = error.filename if isinstance(error.filename, str) else ""
    words = f"{error.strerror or error} in {named if named.startswith(str(path)) else path}"
    located = OSError(error.errno or 0, words)
    located.__cause__ = error
    return tier_io_error(Tier.NVME, operation, located, slot=slot)
