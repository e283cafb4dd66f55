"""Where a server listens: sockets on all addresses of a name, and connections that fit into the
process's descriptors.

Promise: what cannot be listened on is one error that names the flag; a server never takes more
connections than it has descriptors for. Called before the event loop runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import logging
import resource
import socket
from collections.abc import Sequence
from pathlib import Path

from kvtier_engine.server.errors import AddressUnusable, DescriptorsFew
from kvtier_engine.server.limits import Limits

__all__ = ["ACCEPTED_MAX", "BACKLOG", "bound", "url_of", "within_descriptors"]

log = logging.getLogger(__name__)

#: Connections that wait to be accepted.
BACKLOG = 1024
#: So many of them the event loop accepts in one turn.
ACCEPTED_MAX = 16
#: Turns from the one in which a connection is accepted to the one in which it is dropped.
_TURNS = 8
#: For what is opened later: daemon, threads, files of the tokenizer.
_RESERVE = 32
_CONNECTIONS_MIN = 4
#: Any free port may be taken on the second address of a name; then another is tried.
_TRIES = 16
#: This machine does not have that address, or that family.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def bound(host: str, port: int) -> list[socket.socket]:
    """One socket an address of `host` (empty: all of this machine's), with one port (0: any free
    one). Nobody is let in before they listen. Raises AddressUnusable.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise AddressUnusable(
            f"--host {host}: {why}", remedy="pass a name or an address of this machine"
        ) from error
    places = list(dict.fromkeys((family, address[:2]) for family, *_, address in found))
    for left in reversed(range(_TRIES)):
        try:
            return _bound(places, port)
        except OSError as error:
            if left and port == 0 and error.errno == errno.EADDRINUSE:
                continue
            raise _unusable(host, port, error) from error
    raise AssertionError("the last try returns or raises")


def _bound(places: Sequence[tuple[int, tuple[object, ...]]], port: int) -> list[socket.socket]:
    """Raises OSError; where one address is there, those that are not are left out."""
    absent: OSError | None = None
    with contextlib.ExitStack() as stack:
        made: list[socket.socket] = []
        for family, (address, *_) in places:
            try:
                one = stack.enter_context(_one(family, address, port))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                absent = error
                continue
            port = one.getsockname()[1]
            made.append(one)
        if not made and absent is not None:
            raise absent
        stack.pop_all()
    return made


def _one(family: int, address: object, port: int) -> socket.socket:
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind((address, port))
        stack.pop_all()
    return one


def _unusable(host: str, port: int, error: OSError) -> AddressUnusable:
    if error.errno == errno.EADDRINUSE:
        return AddressUnusable(
            f"--port {port}: somebody listens there already", remedy="pass another --port, or 0"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return AddressUnusable(
            f"--port {port}: not allowed to this user", remedy="pass a --port of 1024 or more"
        )
    return AddressUnusable(
        f"--host {host}: {error.strerror}", remedy="pass a name or an address of this machine"
    )


def url_of(address: tuple[str, int]) -> str:
    host, port = address
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).version == 6:
            host = f"[{host}]"
    return f"http://{host}:{port}"


def within_descriptors(limits: Limits) -> Limits:
    """The limits, with as many connections as there are descriptors for: the soft limit of the
    process is raised as far as it is needed and may be. Raises DescriptorsFew.
    """
    # Up to twice as many connections are open (limits.connections_max); more are dropped, some
    # turns of the loop after they were accepted.
    others = len(list(Path("/proc/self/fd").iterdir())) + _TURNS * ACCEPTED_MAX + _RESERVE
    needed = 2 * limits.connections_max + others
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if wanted > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limits
    many = (soft - others) // 2
    if many < _CONNECTIONS_MIN:
        raise DescriptorsFew(
            f"{soft} descriptors are too few to serve", remedy=f"raise ulimit -n to {needed}"
        )
    log.warning(
        "engine.connections_bounded connections_max=%d descriptors=%d wanted=%d: raise ulimit -n",
        many,
        soft,
        needed,
    )
    return dataclasses.replace(limits, connections_max=many)
