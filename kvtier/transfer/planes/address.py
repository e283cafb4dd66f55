"""Where a daemon answers, as text and as what grpc wants to hear.

    unix:///run/kvtier/kvtier.sock     a socket of this host
    grpc://127.0.0.1:7411              plain TCP, this host only
    grpcs://host:7411                  TLS: not in this version

Functions without state: usable from any thread.
"""

from __future__ import annotations

import ipaddress
import os
from typing import Final
from urllib.parse import SplitResult, urlsplit

from kvtier.errors import InvalidConfigValue, NotImplementedYet

__all__ = ["default_url", "grpc_target"]

_SOCKET_PATH_BYTES_MAX: Final = 107  # what the kernel's sockaddr_un holds
_FORMS: Final = "use unix:///absolute/path or grpc://127.0.0.1:port"
_LOCAL_ONLY: Final = "use unix:///path, or grpc://127.0.0.1:port through a tunnel of your own"


def default_url() -> str:
    """Where a daemon of this user listens unless it is configured otherwise."""
    user = os.geteuid()
    if user == 0:
        return "unix:///run/kvtier/kvtier.sock"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    directory = f"{runtime}/kvtier" if runtime else f"/tmp/kvtier-{user}"
    return f"unix://{directory}/kvtier.sock"


def grpc_target(url: str) -> str:
    """grpc's name for `url`. Raises InvalidConfigValue, or NotImplementedYet for other hosts and
    TLS.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidConfigValue(f"url {url!r}: {error}", remedy=_FORMS) from None
    if parts.scheme == "unix":
        return _socket(url, parts)
    if parts.scheme == "grpcs":
        raise NotImplementedYet(f"url {url!r}: TLS is not in this version", remedy=_LOCAL_ONLY)
    if parts.scheme != "grpc":
        raise InvalidConfigValue(f"url {url!r} has no known scheme", remedy=_FORMS)
    if not parts.hostname or not port or parts.path or parts.query or parts.username:
        raise InvalidConfigValue(f"url {url!r} is not grpc://host:port", remedy=_FORMS)
    return _loopback(url, parts.hostname, port)


def _socket(url: str, parts: SplitResult) -> str:
    is_absolute = parts.path.startswith("/") and parts.path != "/"
    if parts.netloc or not is_absolute or parts.query or parts.fragment:
        raise InvalidConfigValue(f"url {url!r} is not unix:///absolute/path", remedy=_FORMS)
    length = len(parts.path.encode(errors="surrogateescape"))
    if length > _SOCKET_PATH_BYTES_MAX or "\0" in parts.path:
        raise InvalidConfigValue(
            f"url {url!r}: a socket path of {length} bytes",
            remedy=f"the system takes up to {_SOCKET_PATH_BYTES_MAX} bytes: use a shorter path",
        )
    return f"unix:{parts.path}"


def _loopback(url: str, host: str, port: int) -> str:
    if host == "localhost":
        return f"dns:///localhost:{port}"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is None or not address.is_loopback:
        raise NotImplementedYet(
            f"url {url!r}: plaintext to another host is refused, and TLS is not in this version",
            remedy=_LOCAL_ONLY,
        )
    return f"ipv4:{host}:{port}" if address.version == 4 else f"ipv6:[{host}]:{port}"
