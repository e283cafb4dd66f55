"""The two bulk messages, PutRequest and GetResponse, built and parsed without copying page bytes.

Promise: what `encode_*` makes and what `parse_*` accepts is plain protobuf. The `data` field is
found, cut out and put in by hand, so its bytes are copied once on the way out (the join that gives
grpc its `bytes`) and not at all on the way in (`data` is a view of the received message). All other
fields are few bytes and go through protobuf.

`parse_*` accepts fields in any order, skips unknown fields and groups, and raises ChunkError for
anything that is not a message. It does not judge what the fields say: that is the caller's
business.

Functions without state: usable from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from kvtier.errors import ChunkError
from kvtier.v1 import transfer_pb2 as pb

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "PAGES_PER_MESSAGE_MAX",
    "GetMessage",
    "PutMessage",
    "encode_get",
    "encode_put",
    "parse_get",
    "parse_put",
]

#: An announcement costs its receiver about 100 bytes even when it is empty on the wire (2 bytes),
#: so the size of a message alone does not bound what it makes the receiver allocate.
PAGES_PER_MESSAGE_MAX: Final = 8192
#: Fields are looked at one by one, so their number bounds how long a message can hold the loop.
_FIELDS_MAX: Final = PAGES_PER_MESSAGE_MAX + 1024

_VARINT, _FIXED64, _BYTES, _GROUP, _GROUP_END, _FIXED32 = range(6)
_PUT_DATA: Final = pb.PutRequest.DATA_FIELD_NUMBER << 3 | _BYTES
_PUT_PAGE: Final = pb.PutRequest.PAGES_FIELD_NUMBER << 3 | _BYTES
_GET_DATA: Final = pb.GetResponse.DATA_FIELD_NUMBER << 3 | _BYTES
_GET_PAGE: Final = pb.GetResponse.PAGES_FIELD_NUMBER << 3 | _BYTES
_VARINT_BYTES_MAX: Final = 10
_TAG_MAX: Final = (1 << 32) - 1
_GROUPS_DEEP_MAX: Final = 100  # as protobuf's own parser

_REMEDY: Final = "send the message as proto/kvtier/v1/transfer.proto defines it"


class PutMessage(NamedTuple):
    """One message of a Put; `open` is None unless sent, `data` is a view of the received bytes."""

    open: pb.PutOpen | None
    pages: Sequence[pb.PutPage]
    offset: int
    data: memoryview


class GetMessage(NamedTuple):
    """One message of a Get answer; `data` is a view of the received bytes."""

    pages: Sequence[pb.GetPage]
    offset: int
    data: memoryview


def encode_put(head: pb.PutRequest, data: Iterable[Buffer] = ()) -> bytes:
    """The wire bytes of `head` with `data`: the pieces (C-contiguous buffers) one after another."""
    assert not head.data, "data goes beside the head, not into it"
    return _join(head.SerializeToString(), _PUT_DATA, data)


def encode_get(head: pb.GetResponse, data: Iterable[Buffer] = ()) -> bytes:
    """The wire bytes of `head` with `data`: the pieces (C-contiguous buffers) one after another."""
    assert not head.data, "data goes beside the head, not into it"
    return _join(head.SerializeToString(), _GET_DATA, data)


def parse_put(raw: bytes) -> PutMessage:
    """Raises ChunkError if `raw` is no PutRequest."""
    head, data = _cut(raw, _PUT_DATA, _PUT_PAGE)
    try:
        message = pb.PutRequest.FromString(head)
    except DecodeError as error:
        raise ChunkError(f"not a PutRequest: {error}", remedy=_REMEDY) from None
    opened = message.open if message.HasField("open") else None
    return PutMessage(opened, message.pages, message.offset, data)


def parse_get(raw: bytes) -> GetMessage:
    """Raises ChunkError if `raw` is no GetResponse."""
    head, data = _cut(raw, _GET_DATA, _GET_PAGE)
    try:
        message = pb.GetResponse.FromString(head)
    except DecodeError as error:
        raise ChunkError(f"not a GetResponse: {error}", remedy=_REMEDY) from None
    return GetMessage(message.pages, message.offset, data)


def _join(head: bytes, data_tag: int, data: Iterable[Buffer]) -> bytes:
    pieces = [memoryview(piece) for piece in data]
    length = sum(piece.nbytes for piece in pieces)
    if length == 0:
        return head
    assert data_tag < 0x80, "a tag of one byte"
    return b"".join((head, bytes((data_tag,)), _varint(length), *pieces))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _cut(raw: bytes, data_tag: int, page_tag: int) -> tuple[Any, memoryview]:
    """(bytes or view of everything but the data field, the data field).

    The last data field wins, as in protobuf.
    """
    view = memoryview(raw)
    end = len(raw)
    data = view[:0]
    kept: list[memoryview] = []
    kept_from = at = pages = 0
    fields = 0
    while at < end:
        start = at
        fields += 1
        if fields > _FIELDS_MAX:
            raise _broken(f"it has more than {_FIELDS_MAX} fields")
        tag, at = _read_varint(raw, at)
        kind = tag & 7
        if kind == _BYTES:
            length, at = _read_varint(raw, at)
            after = at + length
            if tag == data_tag and after <= end:
                kept.append(view[kept_from:start])
                data = view[at:after]
                kept_from = after
            elif tag == page_tag:
                pages += 1
            at = after
        else:
            at = _skip(raw, at, tag)
        if tag >> 3 == 0 or tag > _TAG_MAX or at > end:
            raise _broken(f"the field at byte {start} is cut off or has a number out of range")
    if pages > PAGES_PER_MESSAGE_MAX:
        raise ChunkError(
            f"one message announces {pages} pages, the limit is {PAGES_PER_MESSAGE_MAX}",
            remedy="spread the announcements over several messages",
        )
    if not kept:
        return raw, data
    kept.append(view[kept_from:])
    # Usually the data comes last, and the head is one piece that need not be joined.
    return (kept[0] if len(kept) == 2 and not kept[1] else b"".join(kept)), data


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """(value, place after it)"""
    if at < len(raw) and raw[at] < 0x80:
        return raw[at], at + 1
    value = 0
    for shift, byte in enumerate(raw[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    raise _broken(f"the number at byte {at} does not end")


def _skip(raw: bytes, at: int, tag: int) -> int:
    """The place after the value of a field that is no bytes field; a group is skipped whole."""
    groups: list[int] = []
    while True:
        kind = tag & 7
        if kind == _VARINT:
            _, at = _read_varint(raw, at)
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        elif kind == _BYTES:
            length, at = _read_varint(raw, at)
            at += length
        elif kind == _GROUP and len(groups) < _GROUPS_DEEP_MAX:
            groups.append(tag >> 3)
        elif kind != _GROUP_END or not groups or groups.pop() != tag >> 3:
            raise _broken(f"wire type {kind} before byte {at} makes no sense")
        if not groups:
            return at
        tag, at = _read_varint(raw, at)


def _broken(what: str) -> ChunkError:
    return ChunkError(f"not a protobuf message: {what}", remedy=_REMEDY)
