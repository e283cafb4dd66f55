"""What passes between a client and the daemon over the local plane's control socket.

The socket is SOCK_SEQPACKET, so a frame is a packet: it comes whole or not at all. A frame is one
msgpack map with `kind` (an int, FrameKind) and the fields of its kind; unknown fields are passed
over, a missing one or one of another type is refused.

    HELLO    to the daemon, once, before all else: version, client, writes
    WELCOME  to the client, with its descriptors: version, boot_id, arena_bytes
    REFUSED  to the client, which is then cut off: error, message, remedy
    USED     of a reader: namespace, shard, keys, lookup_hits, lookup_misses, get_hits, get_misses,
             get_bytes
    WRITE    of a writer: number, session_id, namespace, shard, length, keys, parents, depths, sums,
             generations, session, ttl_ms, priority, known, returned, wanted
    WRITTEN  the answer to a WRITE: number, codes, slots, generations, grant_ms, follows

A connection is a reader's (`writes` 0: it gets the arena read-only, and the directory) or a
writer's (1: the arena alone, and it may be written). A client that does both has two.

USED: `keys` are 32 bytes each, one after the other: pages that were read since the last USED, the
head of a chain before its tail. Nothing answers it, and a client may drop it: it says what was
used, so that the daemon keeps it, and is counted.

WRITE seals pages of `length` bytes whose payloads the writer has put into slots that it was granted
(behind the 4 KiB header block, which the daemon writes; what is left of the slot is zeroed). Of
each page: key and parent (32 bytes, zeros: none), depth (u32), sum (the maker's payload_sum, 16)
and generation (u64, which grant). `known` are keys that it found there already, `returned` the
generations of grants that it gives back, `wanted` how many more slots for such pages it would like.
`codes` are PutCodes, one a page; `slots` and `generations` (u64 each) are the new grants, each good
for `grant_ms` from when the WRITE was sent. A grant that was not used by then is not written to any
more: the daemon says STALE_GENERATION to it. With `follows` 1 the grants come in a second WRITTEN:
making room for them can take longer than the seal. Numbers are little-endian.

The version is that of these frames and of the rules of `directory`; golden bytes are in
tests/golden/local_frames_v1.hex. Pure functions, usable from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeAlias, TypeVar

import msgpack

from kvtier.core.page import KEY_BYTES, SUM_BYTES
from kvtier.errors import InvalidFrame
from kvtier.packing.record import SESSION_BYTES_MAX

__all__ = [
    "FRAME_BYTES_MAX",
    "GRANTS_PER_FRAME_MAX",
    "KEYS_PER_FRAME_MAX",
    "PAGES_PER_FRAME_MAX",
    "VERSION",
    "Frame",
    "Hello",
    "Refused",
    "Used",
    "Welcome",
    "Write",
    "Written",
    "decode",
    "encode",
    "invalid",
]

VERSION: Final = 1
FRAME_BYTES_MAX: Final = 64 << 10
KEYS_PER_FRAME_MAX: Final = 1024
#: Pages that one WRITE seals; and those it says are known.
PAGES_PER_FRAME_MAX: Final = 256
GRANTS_PER_FRAME_MAX: Final = 256
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
    WRITE = 5
    WRITTEN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    version: int
    client: str
    writes: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Columns of the same number of pages, each one value after the other; see above."""

    number: int
    session_id: int
    namespace: int
    shard: int
    length: int
    keys: bytes
    parents: bytes
    depths: bytes
    sums: bytes
    generations: bytes
    session: str
    ttl_ms: int
    priority: int
    known: bytes
    returned: bytes
    wanted: int

    def __len__(self) -> int:
        """Pages that it seals."""
        return len(self.keys) // KEY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    number: int
    codes: bytes
    slots: bytes
    generations: bytes
    grant_ms: int
    follows: int


Frame: TypeAlias = Hello | Welcome | Refused | Used | Write | Written

T = TypeVar("T", int, str, bytes)

#: Of each page of a WRITE, beside its key.
_WRITE_COLUMNS: Final = (
    ("parents", KEY_BYTES),
    ("depths", 4),
    ("sums", SUM_BYTES),
    ("generations", 8),
)


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
        return Hello(
            version=_number(fields, "version"),
            client=_text(fields, "client"),
            writes=_number(fields, "writes", 1),
        )
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
    if kind == FrameKind.WRITE:
        return _write(fields)
    if kind == FrameKind.WRITTEN:
        return _written(fields)
    raise invalid(f"is of an unknown kind: {kind}")


def _used(fields: dict[Any, Any]) -> Used:
    keys = _field(fields, "keys", bytes)
    if len(keys) % KEY_BYTES or len(keys) > KEYS_PER_FRAME_MAX * KEY_BYTES:
        raise invalid(f"has keys of {len(keys)} bytes in all")
    namespace, shard = _place(fields)
    names = ("lookup_hits", "lookup_misses", "get_hits", "get_misses", "get_bytes")
    counts = {name: _number(fields, name) for name in names}
    if max(counts.values()) > _BYTES_MAX or max(counts[name] for name in names[:-1]) > _COUNT_MAX:
        raise invalid(f"claims too much: {counts}")
    return Used(namespace=namespace, shard=shard, keys=keys, **counts)


def _write(fields: dict[Any, Any]) -> Write:
    namespace, shard = _place(fields)
    keys = _column(fields, "keys", KEY_BYTES, PAGES_PER_FRAME_MAX)
    columns = {
        name: _column(fields, name, width, PAGES_PER_FRAME_MAX, count=len(keys) // KEY_BYTES)
        for name, width in _WRITE_COLUMNS
    }
    session = _text(fields, "session")
    if len(session.encode(errors="replace")) > SESSION_BYTES_MAX:
        raise invalid(f"has a session of {len(session)} characters")
    return Write(
        number=_number(fields, "number"),
        session_id=_number(fields, "session_id", 2**64 - 1),
        namespace=namespace,
        shard=shard,
        length=_number(fields, "length", _BYTES_MAX),
        keys=keys,
        **columns,
        session=session,
        ttl_ms=_number(fields, "ttl_ms"),
        priority=_number(fields, "priority", 2**31 - 1, least=-(2**31)),
        known=_column(fields, "known", KEY_BYTES, PAGES_PER_FRAME_MAX),
        returned=_column(fields, "returned", 8, GRANTS_PER_FRAME_MAX),
        wanted=_number(fields, "wanted", GRANTS_PER_FRAME_MAX),
    )


def _written(fields: dict[Any, Any]) -> Written:
    slots = _column(fields, "slots", 8, GRANTS_PER_FRAME_MAX)
    return Written(
        number=_number(fields, "number"),
        codes=_column(fields, "codes", 1, PAGES_PER_FRAME_MAX),
        slots=slots,
        generations=_column(fields, "generations", 8, GRANTS_PER_FRAME_MAX, count=len(slots) // 8),
        grant_ms=_number(fields, "grant_ms"),
        follows=_number(fields, "follows", 1),
    )


def _place(fields: dict[Any, Any]) -> tuple[int, int]:
    """(namespace number, shard)"""
    namespace, shard = _number(fields, "namespace"), _number(fields, "shard")
    if namespace >= 1 << 32 or shard >= 1 << 16:
        raise invalid(f"is of shard {shard} of namespace {namespace}")
    return namespace, shard


def _column(
    fields: dict[Any, Any], name: str, width: int, most: int, *, count: int | None = None
) -> bytes:
    """Values of `width` bytes, one after the other."""
    column = _field(fields, name, bytes)
    if len(column) % width or len(column) > most * width:
        raise invalid(f"has {name} of {len(column)} bytes in all")
    if count is not None and len(column) != count * width:
        raise invalid(f"has {len(column)} bytes of {name} for {count}")
    return column


def _field(fields: dict[Any, Any], name: str, kind: type[T]) -> T:
    value = fields.get(name)
    if type(value) is not kind:  # bool is an int, and no number here
        raise invalid(f"has {name} = {value!r:.40}, which is no {kind.__name__}")
    return value


def _number(fields: dict[Any, Any], name: str, most: int = _NUMBER_MAX, *, least: int = 0) -> int:
    value = _field(fields, name, int)
    if not least <= value <= most:
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
    Write: FrameKind.WRITE,
    Written: FrameKind.WRITTEN,
}
