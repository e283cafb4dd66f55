"""The record: one page as it lies in the arena, on NVMe and in a shared store.

A record is a header block of 4096 bytes, then the payload, then zeros up to the next multiple of
4096. All numbers are little-endian; times are milliseconds; bytes not named are zero.

    offset size field
         0    8 magic 89 4b 56 54 52 45 43 0a ("\\x89KVTREC\\n")
         8    4 version              u32, 1
        12    4 header bytes         u32, 4096
        16   32 fingerprint          of the family
        48   32 key
        80   32 parent               zero unless flag 2
       112   16 payload_sum          made by the page's maker (or by a transcode)
       128   16 origin_sum           the maker's sum before a transcode, else zero
       144    8 namespace_generation u64
       152    8 length               u64, payload bytes as packed
       160    8 boot_id              u64  \\
       168    8 generation           u64   | of the daemon that wrote this copy
       176    8 sequence             u64   | (of the copies of a key the highest is the newest)
       184    8 slot                 u64  /  offset of this record in units of 4096
       192    8 created_ms           u64
       200    8 ttl_ms               u64, 0: no opinion
       208    4 shard                u32
       212    4 depth                u32, pages before this one in its chain
       216    4 priority             i32
       220    2 codec                u16
       222    2 tier                 u16
       224    2 flags                u16, 1: lossy, 2: has a parent
       226    2 session bytes        u16, 0 to 256
       228    4 zero
       232  256 session              UTF-8
       488 3600 zero
      4088    8 header_sum           u64, xxh3-64 of bytes 0 to 4087

The header belongs to one copy and is written anew when the page is copied; payload_sum travels with
it unchanged. Version 1 is the only one this module reads or writes.

Pure functions, safe from any thread. `decode_header` copies the block before it looks at it, so the
source may be memory that others can write.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvtier.core.page import KEY_BYTES, NO_SUM, SUM_BYTES, Codec, PageMeta, PageRef, Tier
from kvtier.core.slabs import record_bytes_of
from kvtier.errors import CorruptRecord, KeyLengthError, LimitExceeded
from kvtier.packing.checksum import header_sum

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "HEADER_BYTES",
    "RECORD_ALIGN",
    "RECORD_VERSION",
    "SESSION_BYTES_MAX",
    "RecordHeader",
    "decode_header",
    "encode_header",
    "record_bytes",
]

RECORD_ALIGN: Final = 4096
HEADER_BYTES: Final = 4096
RECORD_VERSION: Final = 1
SESSION_BYTES_MAX: Final = 256

_MAGIC: Final = b"\x89KVTREC\n"
_FIELDS: Final = struct.Struct("<8sII32s32s32s16s16s8Q2IiHHHHI256s3600x")
_SUM: Final = struct.Struct("<Q")
_SUM_OFFSET: Final = HEADER_BYTES - _SUM.size
_FINGERPRINT_BYTES: Final = 32
_NO_PARENT: Final = bytes(KEY_BYTES)
_FLAG_LOSSY: Final = 1
_FLAG_PARENT: Final = 2
_FLAGS_KNOWN: Final = _FLAG_LOSSY | _FLAG_PARENT
# A dict finds the member several times faster than the enum's own constructor.
_CODECS: Final = {int(codec): codec for codec in Codec}
_TIERS: Final = {int(tier): tier for tier in Tier}

assert _FIELDS.size == _SUM_OFFSET


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """What a header block says. `parent` is empty at the head of a chain, `session` when there is
    none.
    """

    fingerprint: bytes
    namespace_generation: int
    shard: int
    key: bytes
    length: int
    codec: Codec
    lossy: bool
    payload_sum: bytes
    origin_sum: bytes = NO_SUM
    generation: int
    sequence: int
    tier: Tier
    slot: int
    parent: bytes = b""
    depth: int = 0
    session: str = ""
    ttl_ms: int = 0
    priority: int = 0
    boot_id: int
    created_ms: int

    @property
    def ref(self) -> PageRef:
        """The tag of the copy that this header belongs to."""
        return PageRef(self.boot_id, self.tier, self.slot, self.generation)

    @property
    def meta(self) -> PageMeta:
        """What the page's maker said about it."""
        return PageMeta(
            key=self.key,
            length=self.length,
            codec=self.codec,
            payload_sum=self.payload_sum,
            origin_sum=self.origin_sum,
            lossy=self.lossy,
            parent=self.parent,
            depth=self.depth,
            session=self.session,
            ttl_ms=self.ttl_ms,
            priority=self.priority,
        )

    def of_copy(self, ref: PageRef, meta: PageMeta) -> RecordHeader:
        """The header of a copy of this record at `ref`, whose payload is packed as `meta` says."""
        return replace(
            self,
            length=meta.length,
            codec=meta.codec,
            lossy=meta.lossy,
            payload_sum=meta.payload_sum,
            origin_sum=meta.origin_sum,
            generation=ref.generation,
            # One counter numbers allocations, so it orders the copies of a key too.
            sequence=ref.generation,
            tier=ref.tier,
            slot=ref.slot,
            boot_id=ref.boot_id,
        )


def record_bytes(payload_bytes: int) -> int:
    """Bytes that a record with such a payload takes up, padding included."""
    return record_bytes_of(payload_bytes)


def encode_header(header: RecordHeader) -> bytes:
    """The 4096 bytes of the header block.

    Raises KeyLengthError for a key or parent, LimitExceeded for a session or number that does not
    fit.
    """
    if len(header.key) != KEY_BYTES or len(header.parent) not in (0, KEY_BYTES):
        raise KeyLengthError(
            f"key has {len(header.key)} and parent {len(header.parent)} bytes",
            remedy=f"both are the {KEY_BYTES} bytes of a chain hash (parent may be empty)",
        )
    assert len(header.fingerprint) == _FINGERPRINT_BYTES, "fingerprint"
    assert len(header.payload_sum) == len(header.origin_sum) == SUM_BYTES, "payload_sum, origin_sum"
    session = _session_bytes(header.session)
    flags = _FLAG_LOSSY * header.lossy | _FLAG_PARENT * bool(header.parent)
    try:
        block = _FIELDS.pack(
            _MAGIC,
            RECORD_VERSION,
            HEADER_BYTES,
            header.fingerprint,
            header.key,
            header.parent,
            header.payload_sum,
            header.origin_sum,
            header.namespace_generation,
            header.length,
            header.boot_id,
            header.generation,
            header.sequence,
            header.slot,
            header.created_ms,
            header.ttl_ms,
            header.shard,
            header.depth,
            header.priority,
            header.codec,
            header.tier,
            flags,
            len(session),
            0,
            session,
        )
    except struct.error as error:
        raise LimitExceeded(
            f"a number of the record header does not fit its field: {error}",
            remedy="see the diagram in kvtier/packing/record.py for the width of every field",
        ) from error
    return block + _SUM.pack(header_sum(block))


def decode_header(buffer: Buffer) -> RecordHeader:
    """Reads the header block at the start of `buffer`, which may be longer.

    Raises CorruptRecord, naming what is wrong: too short, not a record, another version, a sum that
    does not match, or (sum right, so written by a faulty writer) fields that contradict each other.
    """
    block = bytes(memoryview(buffer)[:HEADER_BYTES])
    if len(block) < HEADER_BYTES:
        raise _corrupt(f"the header block is cut off: {len(block)} of {HEADER_BYTES} bytes")
    fields = _FIELDS.unpack_from(block)
    magic, version, header_bytes = fields[:3]
    if magic != _MAGIC:
        raise _corrupt(f"no record here: it starts with {magic.hex()}, not {_MAGIC.hex()}")
    if version != RECORD_VERSION:
        raise _corrupt(f"record version {version}; this build reads version {RECORD_VERSION}")
    stored = _SUM.unpack_from(block, _SUM_OFFSET)[0]
    made = header_sum(memoryview(block)[:_SUM_OFFSET])
    if stored != made:
        raise _corrupt(f"header_sum is {stored:016x}, the block sums to {made:016x}")
    if header_bytes != HEADER_BYTES:
        raise _corrupt(f"header bytes {header_bytes}; version {version} has {HEADER_BYTES}")
    return _from_fields(fields)


# One long statement: unpacking in pieces, or into a dict, takes a third longer per header.
def _from_fields(fields: tuple[Any, ...]) -> RecordHeader:
    # fmt: off
    (_, _, _, fingerprint, key, parent, payload_sum, origin_sum, namespace_generation, length,
     boot_id, generation, sequence, slot, created_ms, ttl_ms, shard, depth, priority, codec_no,
     tier_no, flags, session_bytes, _, session) = fields
    # fmt: on
    codec = _CODECS.get(codec_no)
    tier = _TIERS.get(tier_no)
    if codec is None or tier is None:
        raise _corrupt(f"codec {codec_no} or tier {tier_no} is unknown")
    if flags & _FLAG_PARENT == 0:
        if parent != _NO_PARENT:
            raise _corrupt("a parent without its flag")
        parent = b""
    if flags > _FLAGS_KNOWN:
        raise _corrupt(f"flags {flags:#06x} are unknown")
    return RecordHeader(
        fingerprint=fingerprint,
        namespace_generation=namespace_generation,
        shard=shard,
        key=key,
        length=length,
        codec=codec,
        lossy=flags & _FLAG_LOSSY != 0,
        payload_sum=payload_sum,
        origin_sum=origin_sum,
        generation=generation,
        sequence=sequence,
        tier=tier,
        slot=slot,
        parent=parent,
        depth=depth,
        session=_session_text(session, session_bytes) if session_bytes else "",
        ttl_ms=ttl_ms,
        priority=priority,
        boot_id=boot_id,
        created_ms=created_ms,
    )


def _session_text(session: bytes, nbytes: int) -> str:
    if nbytes > SESSION_BYTES_MAX:
        raise _corrupt(f"a session of {nbytes} bytes")
    try:
        return session[:nbytes].decode()
    except UnicodeDecodeError as error:
        raise _corrupt("the session is not UTF-8") from error


def _session_bytes(session: str) -> bytes:
    if not session:
        return b""
    try:
        encoded = session.encode()
    except UnicodeEncodeError as error:
        raise LimitExceeded(
            "the session name is not valid Unicode text",
            remedy="pass a session name without lone surrogates",
        ) from error
    if len(encoded) > SESSION_BYTES_MAX:
        raise LimitExceeded(
            f"the session name has {len(encoded)} bytes of UTF-8",
            remedy=f"names may have up to {SESSION_BYTES_MAX} bytes; use a hash of longer ones",
        )
    return encoded


def _corrupt(message: str) -> CorruptRecord:
    return CorruptRecord(message, remedy="treat the page as a miss; its slot can be written again")
