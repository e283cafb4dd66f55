"""The directory of one NVMe device: whose it is, that it is private, and that nobody else uses it.

Its file `device`, a sealed file of kind "device", holds a msgpack map: version 2, directory_id (of
the daemon directory), number (of the device there), noted [journal, generation, names] (how far the
daemon directory had got, see nvme_noted). Version 1 had nothing noted. A directory of another
daemon is refused: its pages would be taken for free space.

Errors: DirectoryError for what the operator has to decide; OSError when the file system fails,
which may be over later. Thread rule: any thread; all of it blocks as long as the device does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack

from kvtier.errors import DirectoryError
from kvtier.tiers.nvme_geometry import DEVICES_MAX, DIRECTORY_ID_BYTES
from kvtier.tiers.nvme_noted import NOTHING_NOTED, Noted
from kvtier.tiers.nvme_segment import segment_number
from kvtier.tiers.sealed_file import TEMPORARY_SUFFIX, read_sealed, write_sealed

__all__ = [
    "PROBE_NAME",
    "DeviceDirectory",
    "DeviceIdentity",
    "FileId",
    "file_id_of",
    "is_ours",
    "open_directory",
    "read_identity",
]

log = logging.getLogger(__name__)

DEVICE_VERSION = 2
PROBE_NAME = f"probe{TEMPORARY_SUFFIX}"

#: File system and inode: which file a name leads to.
FileId = tuple[int, int]

_IDENTITY = "device"
_KIND = b"device"
_DISCARD = "start once with `--discard-cache` (every page on NVMe is then a miss)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """Which daemon directory a device belongs to (16 bytes), its number there, and how far that
    directory had got."""

    directory_id: bytes
    number: int
    noted: Noted = NOTHING_NOTED


class DeviceDirectory:
    """An open, locked device directory; made by `open_directory`."""

    def __init__(self, path: Path, fd: int, identity: DeviceIdentity) -> None:
        self.path = path
        self._fd = fd
        self._identity = identity
        self._naming = threading.Lock()  # for the identity and its file

    @property
    def noted(self) -> Noted:
        """What its file says of the daemon directory."""
        return self._identity.noted

    def note(self, noted: Noted) -> None:
        """Durably notes how far the daemon directory has got. Raises OSError, and then what was
        noted before stands."""
        self.check_present()
        with self._naming:
            is_there = self._is_named()
            # That may have hung: the directory can be closed by now, and be another daemon's.
            self.check_present()
            self._write_identity(replace(self._identity, noted=noted), is_there=is_there)

    def check_present(self) -> None:
        """Raises OSError (ENOENT) when the path leads to another directory, or nowhere."""
        if self._fd < 0:
            raise OSError(errno.EBADF, "the device is closed")
        opened = os.fstat(self._fd)
        found = self.path.stat()
        if (found.st_dev, found.st_ino) != (opened.st_dev, opened.st_ino):
            raise OSError(errno.ENOENT, "the directory was replaced by another")

    def keep_identity(self) -> None:
        """Writes the file `device` again if somebody took it away or damaged it: without it no
        start takes the pages for this daemon's. Raises OSError, also if it names another device."""
        if not self._naming.acquire(blocking=False):
            return  # it is being written now
        try:
            if not self._is_named():
                self._write_identity(self._identity, is_there=False)
        finally:
            self._naming.release()

    def _is_named(self) -> bool:
        """Whether its file is there, whole. Raises OSError, also if it names another device."""
        try:
            found = read_identity(self.path)
        except DirectoryError:
            return False
        if found is not None and replace(found, noted=self._identity.noted) != self._identity:
            raise OSError(errno.ESTALE, f"its file `{_IDENTITY}` is that of another device")
        return found is not None

    def _write_identity(self, identity: DeviceIdentity, *, is_there: bool) -> None:
        path = self.path / _IDENTITY
        with _plain_errors():
            write_sealed(path, _KIND, _identity_payload(identity))
        self._identity = identity
        if not is_there:
            log.warning("nvme.device_named_again", extra={"path": str(path)})

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir())

    def other(self, known: Mapping[str, FileId]) -> dict[str, str]:
        """What has become of those of these files that are not to be found by their name any more.
        A stat only where the listing says so. Raises OSError."""
        with os.scandir(self.path) as entries:
            found = {entry.name: entry.inode() for entry in entries}
        others = {}
        for name, file_id in known.items():
            if name not in found:
                others[name] = f"{name} was deleted"
            elif found[name] != file_id[1] and file_id_of(self.path / name) != file_id:
                others[name] = f"{name} was replaced by another file"
        return others

    def sync(self) -> None:
        """Return when all names made and removed before survive a power cut."""
        os.fsync(self._fd)

    def disk_bytes(self) -> int:
        """What the files of kvtier in it take up on disk, as `du` counts."""
        total = 0
        for name in self.names():
            if is_ours(name):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    total += (self.path / name).lstat().st_blocks * 512
        return total

    def discard(self) -> None:
        """Removes everything of kvtier's; what others have put there stays."""
        for name in self.names():
            path = self.path / name
            if is_ours(name) and not stat.S_ISDIR(path.lstat().st_mode):
                path.unlink()

    def remove_leftovers(self) -> None:
        for name in self.names():
            path = self.path / name
            is_left = is_ours(name) and name.endswith(TEMPORARY_SUFFIX)
            if is_left and not stat.S_ISDIR(path.lstat().st_mode):  # that is none of kvtier's
                path.unlink()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def file_id_of(path: Path) -> FileId:
    """Raises OSError."""
    found = path.lstat()
    return found.st_dev, found.st_ino


def is_ours(name: str) -> bool:
    """A file that this package makes in a device directory, half made ones included."""
    whole = name.removesuffix(TEMPORARY_SUFFIX)
    return whole == _IDENTITY or name == PROBE_NAME or segment_number(whole) is not None


def read_identity(path: Path) -> DeviceIdentity | None:
    """Of the device directory `path`; None if it is none (yet).

    Raises DirectoryError (damaged, another version), OSError.
    """
    with _plain_errors():
        payload = read_sealed(path / _IDENTITY, _KIND)
    if payload is None:
        return None
    try:
        document = msgpack.unpackb(payload, raw=False)
    except ValueError as error:
        raise _refused(path / _IDENTITY, f"cannot be read: {error}") from error
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version not in (DEVICE_VERSION, DEVICE_VERSION - 1):
        known = f"{DEVICE_VERSION - 1} and {DEVICE_VERSION}"
        words = f"has version {version}, this daemon knows {known}"
        raise _refused(path / _IDENTITY, words)
    identity = _identity_in(document)
    if identity is None:
        raise _refused(path / _IDENTITY, "does not hold a device's identity")
    return identity


def _identity_in(document: Any) -> DeviceIdentity | None:
    match document:
        case {"version": 1, "directory_id": bytes(directory_id), "number": int(number)}:
            noted = NOTHING_NOTED
        case {
            "version": 2,
            "directory_id": bytes(directory_id),
            "number": int(number),
            "noted": [int(journal), int(generation), int(names)],
        }:
            noted = Noted(journal=journal, generation=generation, names=names)
        case _:
            return None
    if len(directory_id) != DIRECTORY_ID_BYTES or not 0 <= number < DEVICES_MAX:
        return None
    return DeviceIdentity(directory_id=directory_id, number=number, noted=noted)


def open_directory(
    path: Path, identity: DeviceIdentity, *, create: bool = True, discard: bool = False
) -> DeviceDirectory:
    """Makes the directory if need be, locks it, and checks that it is the device `identity`.

    With `create` one that has no identity gets this one; without, that is an error: its file system
    is not mounted, or somebody emptied it. With `discard` it is emptied first, whatever is there,
    unless another daemon uses it. Raises DirectoryError, OSError.
    """
    if create and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        path.chmod(0o700)  # whatever the umask took away
    _check_private(path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    directory = DeviceDirectory(path, fd, identity)
    try:
        _lock(path, fd)
        if discard:
            directory.discard()
        directory._identity = _check_identity(path, identity, create=create)
        with _read_only_is_fine():
            directory.remove_leftovers()
    except (DirectoryError, OSError):
        directory.close()
        raise
    return directory


def _check_private(path: Path) -> None:
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise DirectoryError(f"{path} is not a directory", remedy="name another nvme.paths")
    if found.st_uid != os.geteuid():
        raise DirectoryError(
            f"{path} belongs to uid {found.st_uid}, the daemon runs as uid {os.geteuid()}",
            remedy="run the daemon as the owner, or name another directory in nvme.paths",
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise DirectoryError(
            f"{path} is open to other users (mode {mode:04o})",
            remedy="name a directory of the daemon's own in nvme.paths, which is then made with "
            "mode 0700",
        )


def _lock(path: Path, fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DirectoryError(
            f"{path} is in use by another daemon",
            remedy="stop that daemon, or name another directory in nvme.paths",
        ) from error


def _check_identity(path: Path, identity: DeviceIdentity, *, create: bool) -> DeviceIdentity:
    """As it is there now."""
    found = read_identity(path)
    if found is None and create:
        with _plain_errors():
            write_sealed(path / _IDENTITY, _KIND, _identity_payload(identity))
        return identity
    if found is None:
        raise DirectoryError(
            f"{path} has lost its file `{_IDENTITY}` although it was in use",
            remedy=f"mount its file system, or {_DISCARD}",
        )
    if found.directory_id != identity.directory_id:
        raise DirectoryError(
            f"{path} holds the pages of another daemon directory",
            remedy=f"name another directory in nvme.paths, empty this one, or {_DISCARD}",
        )
    if found.number != identity.number:
        raise DirectoryError(
            f"{path} is device {found.number} of this daemon directory, not {identity.number}",
            remedy=f"put nvme.paths back as they were, or {_DISCARD}",
        )
    return found


def _identity_payload(identity: DeviceIdentity) -> bytes:
    document = {
        "version": DEVICE_VERSION,
        "directory_id": identity.directory_id,
        "number": identity.number,
        "noted": [identity.noted.journal, identity.noted.generation, identity.noted.names],
    }
    payload: bytes = msgpack.packb(document, use_bin_type=True)
    return payload


@contextlib.contextmanager
def _read_only_is_fine() -> Iterator[None]:
    """What a stop left half made stays where nothing can be removed."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """A failing file system as OSError; a damaged file as DirectoryError with the right remedy."""
    try:
        yield
    except DirectoryError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise DirectoryError(str(error), remedy=_DISCARD) from error


def _refused(path: Path, what: str) -> DirectoryError:
    return DirectoryError(
        f"{path} {what}", remedy=f"start the version of kvtier that wrote it, or {_DISCARD}"
    )
