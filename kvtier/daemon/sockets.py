"""Addresses to listen on, taken without taking them from anybody.

A unix socket gets mode 0600 in a directory of mode 0700, whatever the umask, from its first moment
on. A socket file is removed only when nobody answers behind it. Used at the start, on one thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import KvtierError

__all__ = ["SOCKET_PATH_BYTES_MAX", "Refuse", "check_tcp_free", "claimed_socket"]

#: Makes the error to raise from (reason, remedy): about the configured address.
Refuse = Callable[[str, str], KvtierError]

#: What the kernel's sockaddr_un holds.
SOCKET_PATH_BYTES_MAX = 107

_PROBE_S = 2.0
_LOCK_WAIT_S = 5.0
_LOCK_POLL_S = 0.02


@contextmanager
def claimed_socket(path: Path, refuse: Refuse) -> Iterator[None]:
    """While open: `path` is free, its directory private, and a socket bound there gets mode 0600.

    Two daemons that start at once come one after the other. Raises what `refuse` makes.
    """
    directory = path.parent
    try:
        _make_private(directory, refuse)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise refuse(
            f"{directory} cannot be used: {error.strerror}",
            "Name a socket in a directory that the daemon's user can make.",
        ) from error
    try:
        _lock(fd, path, refuse)
        _remove_stale(path, refuse)
        before = os.umask(0o177)
        try:
            yield
        finally:
            os.umask(before)
    finally:
        os.close(fd)


def check_tcp_free(host: str, port: int, refuse: Refuse) -> None:
    """Raises what `refuse` makes when the port cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise refuse(
                f"port {port} cannot be bound: {error.strerror}",
                "Stop what listens there, or name another port.",
            ) from error


def _make_private(directory: Path, refuse: Refuse) -> None:
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
        directory.chmod(0o700)  # whatever the umask took away
    found = directory.stat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        raise refuse(
            f"the socket's directory {directory} is not private to uid {os.geteuid()} "
            f"(owner {found.st_uid}, mode {mode:04o})",
            "Name a socket in a directory of its own, which is then made with mode 0700.",
        )


def _lock(fd: int, path: Path, refuse: Refuse) -> None:
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise refuse(
                    f"another process has locked {path.parent}", "Try again, or stop it."
                ) from None
            time.sleep(_LOCK_POLL_S)
        else:
            return


def _remove_stale(path: Path, refuse: Refuse) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise refuse(f"{path} is there and is not a socket", "Remove it, or name another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            # Whoever does not refuse may be alive, only slow: EAGAIN is a full queue.
            reason = os.strerror(error.errno) if error.errno else str(error)
            if error.errno not in (errno.EAGAIN, None):
                reason += f" ({errno.errorcode.get(error.errno, error.errno)})"
            raise refuse(
                f"a socket is there that may be in use: {reason}",
                "Stop the process that owns it, or name another path.",
            ) from error
    raise refuse(
        "another process answers at this socket",
        "Stop that process (another daemon?), or name another path.",
    )
