"""What the daemon and its scrub process say to each other: frames of msgpack over two pipes.

A frame is its length (u32, little-endian, up to FRAME_BYTES_MAX) and a msgpack map. The daemon
sends one Setup and gets one Hello; then Batches, each answered by one Answer of the same number.

Promise: what `decode` and `from_wire` accept has every field, of the right type and in its range;
anything else is a ValueError that says what is wrong. Values without behaviour: any thread.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

import msgpack

from kvtier.core.page import KEY_BYTES, Codec, Tier
from kvtier.packing.record import HEADER_BYTES, record_bytes
from kvtier.tiers.direct_file import DirectMode

__all__ = [
    "FRAME_BYTES_MAX",
    "LENGTH",
    "PAGES_MAX",
    "Answer",
    "Batch",
    "Finding",
    "Hello",
    "Item",
    "Setup",
    "decode",
    "encode",
]

PROTOCOL_VERSION: Final = 1
FRAME_BYTES_MAX: Final = 1 << 20
#: Pages in one batch at most.
PAGES_MAX: Final = 64
LENGTH: Final = struct.Struct("<I")

_FINGERPRINT_BYTES: Final = 32
_REASON_CHARS_MAX: Final = 200
_Member = TypeVar("_Member", bound=Enum)
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the process needs before it reads anything. `arena_fd` -1: no page of the arena comes.

    `segment_bytes` are those of one segment's slots, 0 without an NVMe tier.
    """

    parent_pid: int
    arena_fd: int
    arena_bytes: int
    segment_bytes: int
    direct: DirectMode
    bytes_per_second: int

    def to_wire(self) -> dict[str, Any]:
        return {
            "version": PROTOCOL_VERSION,
            "parent_pid": self.parent_pid,
            "arena_fd": self.arena_fd,
            "arena_bytes": self.arena_bytes,
            "segment_bytes": self.segment_bytes,
            "direct": self.direct.value,
            "bytes_per_second": self.bytes_per_second,
        }

    @classmethod
    def from_wire(cls, message: Mapping[str, Any]) -> Setup:
        _check_version(message)
        return cls(
            parent_pid=_number(message, "parent_pid", low=1),
            arena_fd=_number(message, "arena_fd", low=-1),
            arena_bytes=_number(message, "arena_bytes"),
            segment_bytes=_number(message, "segment_bytes"),
            direct=_member(DirectMode, message.get("direct")),
            bytes_per_second=_number(message, "bytes_per_second", low=1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """How the process runs. `problems` says what it asked of the system and was not given."""

    nice: int
    io_idle: bool
    problems: tuple[str, ...]

    def to_wire(self) -> dict[str, Any]:
        return {
            "version": PROTOCOL_VERSION,
            "nice": self.nice,
            "io_idle": self.io_idle,
            "problems": list(self.problems),
        }

    @classmethod
    def from_wire(cls, message: Mapping[str, Any]) -> Hello:
        _check_version(message)
        problems = _field(message, "problems", list)
        if not all(type(problem) is str for problem in problems):
            raise ValueError("problems are not texts")
        return cls(
            nice=_number(message, "nice", low=-20),
            io_idle=_field(message, "io_idle", bool),
            problems=tuple(problems),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One copy of a page to read. `boot_id` 0: a copy of any boot (on NVMe)."""

    tier: Tier
    slot: int
    record_bytes: int
    length: int
    generation: int
    boot_id: int
    key: bytes
    fingerprint: bytes
    namespace_generation: int
    shard: int
    codec: Codec

    def to_wire(self) -> list[Any]:
        return [
            int(self.tier),
            self.slot,
            self.record_bytes,
            self.length,
            self.generation,
            self.boot_id,
            self.key,
            self.fingerprint,
            self.namespace_generation,
            self.shard,
            int(self.codec),
        ]

    @classmethod
    def from_wire(cls, fields: Any) -> Item:
        if type(fields) is not list or len(fields) != len(cls.__slots__):
            raise ValueError("an item is not a list of its fields")
        named = dict(zip(cls.__slots__, fields, strict=True))
        numbers = ("slot", "length", "generation", "boot_id", "namespace_generation", "shard")
        values = {name: _number(named, name) for name in numbers}
        total = _number(named, "record_bytes", low=HEADER_BYTES)
        if total != record_bytes(values["length"]):
            raise ValueError(f"a record of {total} bytes with a payload of {values['length']}")
        return cls(
            tier=_member(Tier, named["tier"]),
            codec=_member(Codec, named["codec"]),
            record_bytes=total,
            key=_run(named, "key", KEY_BYTES),
            fingerprint=_run(named, "fingerprint", _FINGERPRINT_BYTES),
            **values,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Pages to read, and the file of every segment that they lie in, by slab."""

    number: int
    items: tuple[Item, ...]
    segments: Mapping[int, Path]

    def to_wire(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "items": [item.to_wire() for item in self.items],
            "segments": [[slab, os.fsencode(path)] for slab, path in self.segments.items()],
        }

    @classmethod
    def from_wire(cls, message: Mapping[str, Any]) -> Batch:
        segments: dict[int, Path] = {}
        for entry in _field(message, "segments", list):
            if type(entry) is not list or [type(part) for part in entry] != [int, bytes]:
                raise ValueError("a segment is not a slab and a path")
            segments[entry[0]] = Path(os.fsdecode(entry[1]))
        items = _field(message, "items", list)
        if len(items) > PAGES_MAX:
            raise ValueError(f"{len(items)} items, at most {PAGES_MAX} are allowed")
        return cls(
            number=_number(message, "number"),
            items=tuple(Item.from_wire(item) for item in items),
            segments=segments,
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """An item of the batch, by its place there, and what is wrong with it."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was found in a batch: every item not named is whole.

    `owed_s` is how long the process will wait before its next read, to keep its rate.
    """

    number: int
    corrupt: tuple[Finding, ...]
    io_errors: tuple[Finding, ...]
    owed_s: float

    def to_wire(self) -> dict[str, Any]:
        def pairs(findings: tuple[Finding, ...]) -> list[list[Any]]:
            return [[found.index, found.reason[:_REASON_CHARS_MAX]] for found in findings]

        return {
            "number": self.number,
            "corrupt": pairs(self.corrupt),
            "io_errors": pairs(self.io_errors),
            "owed_s": self.owed_s,
        }

    @classmethod
    def from_wire(cls, message: Mapping[str, Any], batch: Batch) -> Answer:
        """The answer to `batch`: of its number, and about its items alone, each once at most."""
        number = _number(message, "number")
        if number != batch.number:
            raise ValueError(f"an answer to batch {number}, not to {batch.number}")
        corrupt, io_errors = _findings(message, "corrupt"), _findings(message, "io_errors")
        indexes = [found.index for found in (*corrupt, *io_errors)]
        if len(set(indexes)) != len(indexes) or max(indexes, default=-1) >= len(batch.items):
            raise ValueError(f"findings about items {indexes} of {len(batch.items)}")
        owed_s = _field(message, "owed_s", float)
        if not 0 <= owed_s < float("inf"):
            raise ValueError(f"owed_s is {owed_s}")
        return cls(number=number, corrupt=corrupt, io_errors=io_errors, owed_s=owed_s)


def encode(message: Mapping[str, Any]) -> bytes:
    """The frame of a message. Raises ValueError when it is too long."""
    body: bytes = msgpack.packb(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(body)} bytes, at most {FRAME_BYTES_MAX} are allowed")
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """The message of a frame's body. Raises ValueError."""
    try:
        message = msgpack.unpackb(body)
    except msgpack.UnpackException as error:
        raise ValueError(f"no msgpack: {error}") from error
    if type(message) is not dict:
        raise ValueError(f"the message is no map but {type(message).__name__}")
    return message


def _check_version(message: Mapping[str, Any]) -> None:
    version = _number(message, "version")
    if version != PROTOCOL_VERSION:
        raise ValueError(f"version {version}, not {PROTOCOL_VERSION}")


def _field(message: Mapping[str, Any], name: str, kind: type[_Kind]) -> _Kind:
    value = message.get(name)
    # Not isinstance: True is no number here.
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}")
    return value


def _number(message: Mapping[str, Any], name: str, *, low: int = 0) -> int:
    value = _field(message, name, int)
    if value < low:
        raise ValueError(f"{name} is {value}")
    return value


def _run(message: Mapping[str, Any], name: str, length: int) -> bytes:
    value = _field(message, name, bytes)
    if len(value) != length:
        raise ValueError(f"{name} has {len(value)} bytes, not {length}")
    return value


def _member(kind: type[_Member], value: Any) -> _Member:
    if type(value) not in (int, str):
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return kind(value)


def _findings(message: Mapping[str, Any], name: str) -> tuple[Finding, ...]:
    found = []
    for entry in _field(message, name, list):
        if type(entry) is not list or [type(part) for part in entry] != [int, str] or entry[0] < 0:
            raise ValueError(f"{name} holds {entry!r}")
        found.append(Finding(entry[0], entry[1][:_REASON_CHARS_MAX]))
    return tuple(found)
