"""The arguments of get and put, looked at before anything is sent.

Made in the caller's thread; a call holds the caller's memory and is used once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from kvtier.client.buffers import Allocated, Request, Rows
from kvtier.client.codec_thread import require_packer
from kvtier.client.keys import KeyChain, checked_keys
from kvtier.client.reading import GetOptions
from kvtier.client.tensors import check_dtype, rows_of
from kvtier.client.writing import PutOptions
from kvtier.core.page import Codec, Durability, Tier
from kvtier.errors import LimitExceeded
from kvtier.packing.layout import Layout
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import Hints

__all__ = [
    "GetArguments",
    "GetCall",
    "PutArguments",
    "PutCall",
    "checked_tier",
    "checked_traceparent",
    "milliseconds",
    "whole",
]

_SESSION_BYTES_MAX: Final = 256
_TRACEPARENT_CHARS_MAX: Final = 64
_MS_MAX: Final = 2**63 - 1
_DEPTH_MAX: Final = 2**32 - 1
_PRIORITY_MAX: Final = 2**31 - 1
_DURABILITY: Final = {"host": Durability.HOST, "nvme": Durability.NVME}
_NO_HINTS: Final = Hints()
_HINT_NAMES: Final = frozenset(
    ("session", "ttl", "priority", "traceparent", "session_end", "expected_return")
)
_PLAIN_GET: Final = GetOptions(accept=(Codec.RAW,), lossy_ok=False, hints=_NO_HINTS)
_TIERS: Final = {tier.name.lower(): tier for tier in (Tier.HOST, Tier.NVME)}


class GetArguments(TypedDict, total=False):
    """Keyword arguments of get. `codec` accepts copies packed so alone (FP8 implies `lossy_ok`);
    `deadline` in seconds; `traceparent` as W3C writes it.
    """

    lossy_ok: bool
    codec: Codec | None
    session: str
    ttl: float
    priority: int
    traceparent: str
    session_end: bool
    expected_return: float | None
    deadline: float | None


class PutArguments(TypedDict, total=False):
    """Keyword arguments of put; `ttl` and `deadline` in seconds; `traceparent` as W3C writes it."""

    codec: Codec
    parent: bytes | None
    depth: int
    chain: bool
    session: str
    ttl: float
    priority: int
    durable: str | Durability
    traceparent: str
    session_end: bool
    expected_return: float | None
    deadline: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetCall:
    keys: list[bytes]
    rows: Rows
    options: GetOptions
    deadline: Deadline

    @classmethod
    def of(
        cls,
        layout: Layout,
        keys: Sequence[bytes],
        out: object,
        at: object,
        given: GetArguments,
        *,
        deadline: Deadline,
    ) -> GetCall:
        """Raises KeyLengthError, PageSizeError, LimitExceeded, MissingExtra; TypeError as a call
        would.
        """
        checked = checked_keys(keys)
        options = cls._options(layout, given) if given else _PLAIN_GET
        check_dtype(out, "out", layout)
        request = Request(name="out", count=len(checked), nbytes=layout.raw_bytes, writable=True)
        return cls(
            keys=checked,
            rows=rows_of(out, request, at) if checked else Allocated(request),
            options=options,
            deadline=deadline,
        )

    @staticmethod
    def _options(layout: Layout, given: GetArguments) -> GetOptions:
        _check_names(given, GetArguments, "get")
        codec = None if given.get("codec") is None else _codec(given["codec"])
        # Who names FP8 asks for rounded numbers, unless he says that he does not.
        lossy_ok = given.get("lossy_ok", codec is Codec.FP8)
        if not isinstance(lossy_ok, bool):
            raise LimitExceeded(f"lossy_ok is {lossy_ok!r}", remedy="pass True or False")
        accept: tuple[Codec, ...] = (Codec.RAW,) if codec is None else (codec,)
        if codec is None and lossy_ok and layout.fp8_bytes:
            accept = (Codec.RAW, Codec.FP8)
        if Codec.FP8 in accept:
            require_packer()
        return GetOptions(accept=accept, lossy_ok=lossy_ok, hints=_hints(given))


@dataclass(frozen=True, slots=True, kw_only=True)
class PutCall:
    keys: list[bytes]
    rows: Rows
    options: PutOptions
    deadline: Deadline

    @classmethod
    def of(
        cls,
        layout: Layout,
        keys: Sequence[bytes],
        pages: object,
        at: object,
        given: PutArguments,
        *,
        deadline: Deadline,
    ) -> PutCall:
        """Raises as GetCall.of, and LayoutError for a layout that the codec cannot pack."""
        _check_names(given, PutArguments, "put")
        checked = checked_keys(keys)
        codec = _codec(given.get("codec", Codec.RAW))
        layout.payload_bytes(codec)
        if codec is Codec.FP8:
            require_packer()
        is_chain = given.get("chain", True)
        parent, depth = given.get("parent"), given.get("depth")
        if isinstance(keys, KeyChain) and is_chain:
            parent = keys.parent if parent is None else parent
            depth = keys.depth if depth is None else depth
        check_dtype(pages, "pages", layout)
        request = Request(name="pages", count=len(checked), nbytes=layout.raw_bytes, writable=False)
        return cls(
            keys=checked,
            rows=rows_of(pages, request, at) if checked else Allocated(request),
            options=PutOptions(
                codec=codec,
                durability=_durability(given.get("durable", Durability.HOST)),
                hints=_hints(given),
                parent=checked_keys([parent])[0] if parent else b"",
                depth=whole("depth", depth or 0, 0, _DEPTH_MAX - len(checked)),
                is_chain=is_chain,
            ),
            deadline=deadline,
        )


def milliseconds(name: str, seconds: object) -> int:
    """Whole milliseconds, rounded up. Raises LimitExceeded."""
    if not isinstance(seconds, int | float) or not 0 <= seconds < _MS_MAX / 1000:
        raise LimitExceeded(
            f"{name} is {seconds!r}", remedy="pass a number of seconds, 0 for no opinion"
        )
    return math.ceil(seconds * 1000)


def checked_tier(given: Tier | str) -> Tier:
    """A tier of the daemon. Raises LimitExceeded."""
    known = given if isinstance(given, Tier) else _TIERS.get(given)
    if known is None or known not in _TIERS.values():
        raise LimitExceeded(f"tier is {given!r}", remedy='use "host" or "nvme"')
    return known


def checked_traceparent(given: object) -> str:
    """Raises LimitExceeded for what cannot be a W3C traceparent."""
    is_text = isinstance(given, str) and given.isascii() and given.isprintable()
    if not is_text or len(str(given)) > _TRACEPARENT_CHARS_MAX:
        raise LimitExceeded(
            f"traceparent is {given!r}",
            remedy=f"pass W3C's text, up to {_TRACEPARENT_CHARS_MAX} ASCII characters",
        )
    return str(given)


def checked_session(given: object) -> str:
    """Raises LimitExceeded for what cannot name a conversation."""
    try:
        nbytes = len(given.encode()) if isinstance(given, str) else -1
    except UnicodeEncodeError:
        nbytes = -1
    if not 0 <= nbytes <= _SESSION_BYTES_MAX:
        raise LimitExceeded(
            f"session is {given!r:.80}",
            remedy=f"name a conversation in up to {_SESSION_BYTES_MAX} bytes of text, say a hash",
        )
    return str(given)


def _hints(given: GetArguments | PutArguments) -> Hints:
    if _HINT_NAMES.isdisjoint(given):
        return _NO_HINTS
    return Hints(
        session=checked_session(given.get("session", "")),
        ttl_ms=milliseconds("ttl", given.get("ttl", 0.0)),
        priority=whole("priority", given.get("priority", 0), -_PRIORITY_MAX, _PRIORITY_MAX),
        traceparent=checked_traceparent(given.get("traceparent", "")),
        ended=_ended(given),
        return_ms=_return_ms(given),
    )


def _ended(given: GetArguments | PutArguments) -> bool:
    ended = given.get("session_end", False)
    if not isinstance(ended, bool):
        raise LimitExceeded(f"session_end is {ended!r}", remedy="pass True or False")
    return ended


def _return_ms(given: GetArguments | PutArguments) -> int | None:
    after = given.get("expected_return")
    if after is not None and given.get("session_end", False):
        raise LimitExceeded(
            f"expected_return is {after!r} and session_end is True", remedy="pass one of them"
        )
    return None if after is None else milliseconds("expected_return", after)


def whole(name: str, value: object, low: int, high: int) -> int:
    """Raises LimitExceeded for what is no whole number from `low` to `high`."""
    if not isinstance(value, int) or not low <= value <= high:
        raise LimitExceeded(
            f"{name} is {value!r}", remedy=f"pass a whole number from {low} to {high}"
        )
    return int(value)  # True is one, and no number on the wire


def _codec(given: object) -> Codec:
    """Raises LimitExceeded for what is no Codec: a name of one neither."""
    if not isinstance(given, Codec):
        known = ", ".join(f"kvtier.Codec.{codec.name}" for codec in Codec)
        raise LimitExceeded(f"codec is {given!r}", remedy=f"pass one of {known}")
    return given


def _durability(given: str | Durability) -> Durability:
    known = given if isinstance(given, Durability) else None
    if isinstance(given, str):
        known = _DURABILITY.get(given)
    if known is None:
        raise LimitExceeded(f"durable is {given!r}", remedy='use "host" or "nvme"')
    return known


def _check_names(given: GetArguments | PutArguments, known: type, method: str) -> None:
    unknown = given.keys() - known.__annotations__.keys() if given else ()
    if unknown:
        raise TypeError(f"{method}() got an unexpected keyword argument {min(unknown)!r}")
