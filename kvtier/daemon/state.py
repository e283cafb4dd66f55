"""The daemon directory: who owns it, which generations are spent, which namespaces there are.

    lock         flock of the running daemon; its pid as text
    format       the directory's version; written last, so its presence says that the rest is there
    generations  the bound below which generations may have been used
    namespaces   the registry of namespaces, as core gives it

A generation bound is durable before any generation below it is used, and a restart begins at the
bound, so that no generation is ever used twice, whenever the process is killed. A damaged or
missing file is an error: starting from zero would repeat generations. While the daemon runs, `keep`
writes again what somebody took away. Safe from any thread.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import threading
from pathlib import Path
from typing import Any

import msgpack

from kvtier.errors import DirectoryError
from kvtier.tiers.nvme_state import sync_directory
from kvtier.tiers.plain_file import known_remedy, open_plain
from kvtier.tiers.sealed_file import (
    DISCARD,
    LOST_STATE,
    TEMPORARY_SUFFIX,
    Signature,
    read_sealed,
    signature_of,
    write_sealed,
)

__all__ = ["FORMAT_VERSION", "LOCAL_SOCKET", "DaemonDirectory", "new_boot_id", "open_directory"]

log = logging.getLogger(__name__)

#: 2: there may be an NVMe tier. A directory of version 1 is taken over.
FORMAT_VERSION = 2
_READABLE = (FORMAT_VERSION, FORMAT_VERSION - 1)

_FORMAT = "format"
_GENERATIONS = "generations"
_NAMESPACES = "namespaces"
_LOCK = "lock"
_KINDS = {_FORMAT: b"format", _GENERATIONS: b"gens", _NAMESPACES: b"names"}
#: The local plane's, which a daemon that was killed leaves behind.
LOCAL_SOCKET = "local.sock"
#: What the eviction policy has learned; a start does without it.
FORECASTS = "forecasts"
_OURS = frozenset((_FORMAT, _GENERATIONS, _NAMESPACES, _LOCK, LOCAL_SOCKET, FORECASTS))
_OURS_OF_NVME = re.compile(r"(geometry|checkpoint(\.old)?|journals|journal-[0-9]{10,19})(\.tmp)?")


def new_boot_id() -> int:
    """Names this life of the daemon: random, 63 bits, never 0."""
    return secrets.randbelow(2**63 - 1) + 1


class DaemonDirectory:
    """An open, locked daemon directory. Close it last: the lock keeps other daemons away."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._bound = 0
        self._lock = threading.RLock()  # for what follows, and the files themselves
        #: The small files as they were written or read last, and how they looked then.
        self._kept: dict[str, tuple[bytes, bytes, Signature | None]] = {}

    @property
    def generation_bound(self) -> int:
        """Generations up to this one may have been used; begin above."""
        return self._bound

    def journal_generations(self, bound: int) -> None:
        """Makes `bound` durable. Raises DirectoryError, and then nothing up to it may be used."""
        if bound <= self._bound:
            raise ValueError(f"generation bound {bound} does not rise above {self._bound}")
        with self._lock:
            self.keep()
            self._write(_GENERATIONS, bound.to_bytes(8, "little"))
            self._bound = bound

    def save_namespaces(self, state: dict[str, Any]) -> None:
        """Makes the registry durable before it returns, in a directory that a start can use.
        Raises DirectoryError."""
        with self._lock:
            self.keep()
            self._write(_NAMESPACES, msgpack.packb(state, use_bin_type=True))

    def load_namespaces(self) -> dict[str, Any]:
        payload = self._read(_NAMESPACES)
        if payload is None:
            raise _missing(self.path, _NAMESPACES)
        return _unpack_namespaces(self.path, payload)

    def keep(self) -> None:
        """Writes those of its files again that are not as this daemon wrote them. A stat a file
        where nothing is amiss. Raises DirectoryError: they cannot be written, or the path leads to
        another directory, of which nothing is known."""
        with self._lock:
            self._check_ours()
            for name, (kind, payload, known) in list(self._kept.items()):
                if known is None or signature_of(self.path / name) != known:
                    self._write(name, payload, kind)
                    log.warning("daemon.state_restored", extra={"path": str(self.path / name)})

    def mind(self, name: str, kind: bytes) -> None:
        """`keep` sees to this sealed file too, as it is now. Raises DirectoryError."""
        with self._lock:
            known = signature_of(self.path / name)
            payload = read_sealed(self.path / name, kind)
            if payload is not None:
                self._kept[name] = kind, payload, known

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> DaemonDirectory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_ours(self) -> None:
        """Raises DirectoryError when the path leads to another directory than the locked one."""
        try:
            here = (self.path / _LOCK).stat()
        except OSError:
            here = None
        locked = os.fstat(self._lock_fd)
        if here is None or (here.st_dev, here.st_ino) != (locked.st_dev, locked.st_ino):
            raise DirectoryError(
                f"{self.path} is not the directory that this daemon has locked: it was removed or "
                f"replaced, or its file `{_LOCK}` was",
                remedy="Put it back, or restart this daemon: it makes nothing durable meanwhile.",
            )

    def _prepare(self, *, read_only: bool) -> None:
        """Checks every file, or makes them in a new directory."""
        if not read_only:
            self._remove_leftovers()
            # A process that was killed may have put a file in its place and not made that last:
            # what goes on from here must not be on disk before it.
            sync_directory(self.path)
        before = {name: signature_of(self.path / name) for name in _KINDS}
        version = self._read(_FORMAT)
        generations = self._read(_GENERATIONS)
        namespaces = self._read(_NAMESPACES)
        if version is None:
            if read_only:
                raise _missing(self.path, _FORMAT)
            self._make_new(generations, namespaces)
            return
        found = {_FORMAT: version, _GENERATIONS: generations, _NAMESPACES: namespaces}
        self._kept = {
            name: (_KINDS[name], payload, before[name])
            for name, payload in found.items()
            if payload is not None
        }
        number = int.from_bytes(version, "little")
        if len(version) != 4 or number not in _READABLE:
            raise DirectoryError(
                f"{self.path} has format version {number}, "
                f"this daemon knows versions {FORMAT_VERSION - 1} and {FORMAT_VERSION}",
                remedy="Start the version of kvtier that wrote it, or give up what is cached there "
                "with `kvtier serve --discard-cache`.",
            )
        if generations is None or len(generations) != 8:
            raise _missing(self.path, _GENERATIONS)
        if namespaces is None:
            raise _missing(self.path, _NAMESPACES)
        self._bound = int.from_bytes(generations, "little")
        _unpack_namespaces(self.path, namespaces)
        if number != FORMAT_VERSION and not read_only:
            self._write(_FORMAT, FORMAT_VERSION.to_bytes(4, "little"))

    def _read(self, name: str) -> bytes | None:
        return read_sealed(self.path / name, _KINDS[name])

    def _write(self, name: str, payload: bytes, kind: bytes | None = None) -> None:
        kind = kind or _KINDS[name]
        write_sealed(self.path / name, kind, payload)
        self._kept[name] = kind, payload, signature_of(self.path / name)

    def _remove_leftovers(self) -> None:
        for leftover in self.path.glob(f"*{TEMPORARY_SUFFIX}"):
            if leftover.name.removesuffix(TEMPORARY_SUFFIX) in _OURS:
                leftover.unlink()

    def _make_new(self, generations: bytes | None, namespaces: bytes | None) -> None:
        # A start that was cut short leaves the two files below in their first state, and no format.
        _refuse_strangers(
            self.path, [item for item in self.path.iterdir() if item.name not in _OURS]
        )
        if generations not in (None, bytes(8)) or namespaces not in (None, msgpack.packb({})):
            raise _missing(self.path, _FORMAT)
        self._write(_GENERATIONS, bytes(8))
        self._write(_NAMESPACES, msgpack.packb({}))
        self._write(_FORMAT, FORMAT_VERSION.to_bytes(4, "little"))


def open_directory(
    path: Path, *, discard_cache: bool = False, read_only: bool = False
) -> DaemonDirectory:
    """Makes or opens the directory and locks it; with `discard_cache` it begins anew.

    With `read_only` nothing is made or changed but the lock: for a look at it from outside.

    Raises DirectoryError: locked by another daemon (its pid is named), open to other users, of
    another version, damaged, or not a daemon directory.
    """
    try:
        _make_private(path)
        lock_fd = open_plain(path / _LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise DirectoryError(
            f"{_named(path, error)} cannot be used: {error.strerror}",
            remedy=_remedy(path, error)
            or "Name a daemon.directory that the daemon's user can make and write.",
        ) from error
    directory = DaemonDirectory(path, lock_fd)
    try:
        _lock(path, lock_fd)
        if discard_cache:
            _discard(path)
        directory._prepare(read_only=read_only)
    except DirectoryError:
        directory.close()
        raise
    except OSError as error:
        directory.close()
        raise DirectoryError(
            f"{_named(path, error)} cannot be used: {error.strerror}",
            remedy=_remedy(path, error) or "Check the disk (kernel log, SMART data).",
        ) from error
    return directory


def _named(path: Path, error: OSError) -> Path:
    """The file that the system named, where it did."""
    return Path(error.filename) if isinstance(error.filename, str) else path


def _remedy(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"Make room on the file system of {path} and start again; nothing was lost."
    return known_remedy(_named(path, error), error)


def _discard(path: Path) -> None:
    """Removes everything of ours but the lock, if nothing else is there. `format` goes last: a
    start that is cut short here finds a directory that was in use, and says so."""
    items = list(path.iterdir())
    ours = [item for item in items if item.name in _OURS or _OURS_OF_NVME.fullmatch(item.name)]
    _refuse_strangers(path, [item for item in items if item not in ours])
    for item in sorted(ours, key=lambda item: item.name == _FORMAT):
        if item.name != _LOCK:
            item.unlink()


def _refuse_strangers(path: Path, strangers: list[Path]) -> None:
    if strangers:
        raise DirectoryError(
            f"{path} is not a daemon directory and not empty ({min(strangers).name} is there)",
            remedy="Name an empty or new daemon.directory; if its file `format` was lost,"
            f" {DISCARD}.",
        )


def _make_private(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        path.chmod(0o700)  # whatever the umask took away
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise DirectoryError(f"{path} is not a directory", remedy="Name another daemon.directory.")
    if found.st_uid != os.geteuid():
        raise DirectoryError(
            f"{path} belongs to uid {found.st_uid}, the daemon runs as uid {os.geteuid()}",
            remedy="Run the daemon as the owner, or name another daemon.directory.",
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise DirectoryError(
            f"{path} is open to other users (mode {mode:04o})",
            remedy="Name a directory of the daemon's own, which is then made with mode 0700.",
        )


def _lock(path: Path, lock_fd: int) -> None:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        raise DirectoryError(
            f"{path} is in use by the daemon with pid {pid}",
            remedy="Stop that daemon, or name another daemon.directory.",
        ) from error
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)


def _unpack_namespaces(path: Path, payload: bytes) -> dict[str, Any]:
    try:
        state = msgpack.unpackb(payload, raw=False, strict_map_key=False)
    except ValueError as error:
        raise DirectoryError(
            f"{path / _NAMESPACES} cannot be read: {error}",
            remedy=LOST_STATE,
        ) from error
    if not isinstance(state, dict):
        raise DirectoryError(
            f"{path / _NAMESPACES} does not hold a registry",
            remedy=LOST_STATE,
        )
    return state


def _missing(path: Path, name: str) -> DirectoryError:
    return DirectoryError(
        f"{path / name} is missing although the directory was in use",
        remedy=LOST_STATE,
    )
