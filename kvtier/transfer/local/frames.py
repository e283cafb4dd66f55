"""What passes between a client and the daemon over the local plane's control socket.

The socket is SOCK_SEQPACKET, so a frame is a packet: it comes whole or not at all. A frame is one
msgpack map with `kind` (an int, FrameKind) and the fields of its kind; unknown fields are passed
over, a missing one or one of another type is refused.

    HELLO    to the daemon, once, before all else: version, client
    WELCOME  to the client, with two descriptors (arena, directory): version, boot_id, arena_bytes
    REFUSED  to the client, which is then cut off: error, message, remedy
    USED     to the daemon: namespace, shard, keys, lookup_hits, lookup_misses, get_hits,
             get_misses, get_bytes

`keys` are 32 bytes each, one after the other: pages that were read since the last USED, the head of
a chain before its tail. Nothing answers USED, and a client may drop it: it says what was used, so
that the daemon keeps it, and is counted.

The version is that of these frames and of the rules of `directory`; golden bytes are in
tests/golden/local_frames_v1.hex. Pure functions, usable from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeAlias, TypeVar

import msgpack

from kvtier.core.page import KEY_BYTES
from kvtier.errors import InvalidFrame

__all__ = [
    "FRAME_BYTES_MAX",
    "KEYS_PER_FRAME_MAX",
    "VERSION",
    "Frame",
    "Hello",
    "Refused",
    "Used",
    "Welcome",
    "decode",
    "encode",
    "invalid",
]

VERSION: Final = 1
FRAME_BYTES_MAX: Final = 64 << 10
KEYS_PER_FRAME_MAX: Final = 1024
_TEXT_MAX: Final = 4096
_NUMBER_MAX: Final = 2**63 - 1
#: What a client may claim in one frame.
_COUNT_MAX: Final = 2**32
_BYTES_MAX: Final = 2**48


class FrameKind(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    USED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    version: int
    client: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    version: int
    boot_id: int
    arena_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """`error` is the name of a class of kvtier.errors."""

    error: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Of one namespace and shard: `keys` were read; how many keys were looked up and found or not;
    how many pages were read and their bytes, and how many were not there."""

    namespace: int
    shard: int
    keys: bytes
    lookup_hits: int
    lookup_misses: int
    get_hits: int
    get_misses: int
    get_bytes: int


Frame: TypeAlias = Hello | Welcome | Refused | Used

T = TypeVar("T", int, str, bytes)


def encode(frame: Frame) -> bytes:
    """One packet. The sender keeps the bounds; a frame beyond them is its programmer's mistake."""
    fields: dict[str, Any] = {
        name: getattr(frame, name) for name in type(frame).__dataclass_fields__
    }
    packet: bytes = msgpack.packb({"kind": int(_KINDS[type(frame)]), **fields})
    assert len(packet) <= FRAME_BYTES_MAX, f"a frame of {len(packet)} bytes"
    return packet


def decode(packet: bytes | memoryview) -> Frame:
    """Raises InvalidFrame for anything that is not a frame of this version."""
    if len(packet) > FRAME_BYTES_MAX:
        raise invalid(f"has more than {FRAME_BYTES_MAX} bytes")
    try:
        fields = msgpack.unpackb(packet, strict_map_key=True, max_map_len=32, max_array_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise invalid(f"is no msgpack: {error}") from error
    if not isinstance(fields, dict):
        raise invalid("is no map")
    kind = _field(fields, "kind", int)
    if kind == FrameKind.HELLO:
        return Hello(version=_number(fields, "version"), client=_text(fields, "client"))
    if kind == FrameKind.WELCOME:
        return Welcome(
            version=_number(fields, "version"),
            boot_id=_number(fields, "boot_id"),
            arena_bytes=_number(fields, "arena_bytes"),
        )
    if kind == FrameKind.REFUSED:
        return Refused(**{name: _text(fields, name) for name in ("error", "message", "remedy")})
    if kind == FrameKind.USED:
        return _used(fields)
    raise invalid(f"is of an unknown kind: {kind}")


def _used(fields: dict[Any, Any]) -> Used:
    keys = _field(fields, "keys", bytes)
    if len(keys) % KEY_BYTES or len(keys) > KEYS_PER_FRAME_MAX * KEY_BYTES:
        raise invalid(f"has keys of {len(keys)} bytes in all")
    namespace, shard = _number(fields, "namespace"), _number(fields, "shard")
    if namespace >= 1 << 32 or shard >= 1 << 16:
        raise invalid(f"is of shard {shard} of namespace {namespace}")
    names = ("lookup_hits", "lookup_misses", "get_hits", "get_misses", "get_bytes")
    counts = {name: _number(fields, name) for name in names}
    if max(counts.values()) > _BYTES_MAX or max(counts[name] for name in names[:-1]) > _COUNT_MAX:
        raise invalid(f"claims too much: {counts}")
    return Used(namespace=namespace, shard=shard, keys=keys, **counts)


def _field(fields: dict[Any, Any], name: str, kind: type[T]) -> T:
    value = fields.get(name)
    if type(value) is not kind:  # bool is an int, and no number here
        raise invalid(f"has {name} = {value!r:.40}, which is no {kind.__name__}")
    return value


def _number(fields: dict[Any, Any], name: str) -> int:
    value = _field(fields, name, int)
    if not 0 <= value <= _NUMBER_MAX:
        raise invalid(f"has {name} = {value}")
    return value


def _text(fields: dict[Any, Any], name: str) -> str:
    value = _field(fields, name, str)
    if len(value) > _TEXT_MAX:
        raise invalid(f"has {len(value)} characters of {name}")
    return value


def invalid(what: str) -> InvalidFrame:
    """The error about a frame that `what`."""
    return InvalidFrame(
        f"a frame of the local plane {what}",
        remedy="use a client and daemon of the same version; the session goes on over gRPC",
    )


_KINDS: Final[dict[type[Frame], FrameKind]] = {
    Hello: FrameKind.HELLO,
    Welcome: FrameKind.WELCOME,
    Refused: FrameKind.REFUSED,
    Used: FrameKind.USED,
}
