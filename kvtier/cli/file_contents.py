"""The work of `kvtier inspect`: what a file of kvtier is, and what it says.

A file is known by its first bytes, and if they are damaged by its name. Nothing is locked and
nothing is changed; of a file that a daemon is writing, it may see half. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack

from kvtier.errors import CorruptRecord, DirectoryError, InvalidConfigValue
from kvtier.packing.checksum import verify_payload
from kvtier.packing.record import HEADER_BYTES, RecordHeader, decode_header, record_bytes
from kvtier.tiers.nvme_checkpoint import CHECKPOINT_MAGIC, CheckpointState, read_checkpoint
from kvtier.tiers.nvme_frames import JOURNAL_MAGIC, Delete, Drop, Entry, Known, Mark
from kvtier.tiers.nvme_geometry import load_geometry, split_slab
from kvtier.tiers.nvme_journal import read_journal
from kvtier.tiers.nvme_lengths import LENGTHS, LENGTHS_MAGIC, parse_lengths
from kvtier.tiers.nvme_segment import SEGMENT_HEADER_BYTES, decode_segment_header, segment_number
from kvtier.tiers.nvme_snapshot import Snapshot
from kvtier.tiers.sealed_file import read_sealed

__all__ = ["Contents", "inspect_file"]

_SEALED_MAGIC: Final = b"KVTSEAL\x01"
_SEGMENT_MAGIC: Final = b"\x89KVTSEG\n"
_RECORD_MAGIC: Final = b"\x89KVTREC\n"
_HEX_MAX: Final = 256
_LOCK_BYTES_MAX: Final = 32
_READ_BYTES: Final = 1 << 20
#: By name, for files whose first bytes are damaged.
_SEALED_NAMES: Final = {
    "format": b"format",
    "generations": b"gens",
    "namespaces": b"names",
    "geometry": b"geom",
    "device": b"device",
}
_KEY_BYTES: Final = 32
_REMEDY: Final = "name a checkpoint, journal, segment, record, or a file of a daemon directory"


@dataclass(slots=True, kw_only=True)
class Contents:
    """`facts` are about the file, `items` what it holds, one after another, both of plain values;
    `problems` says what is damaged.
    """

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def inspect_file(path: Path) -> Contents:
    """What `path` is and says. Raises InvalidConfigValue when it is no file of kvtier, OSError."""
    if not path.is_file() and path.exists():
        raise InvalidConfigValue(f"{path} is not a regular file", remedy=_REMEDY)
    with path.open("rb") as file:
        start = file.read(8)
    reader = _READERS.get(start) or _reader_by_name(path.name)
    if reader is None:
        raise InvalidConfigValue(
            f"{path} is no file of kvtier: it begins with {start.hex() or 'nothing'}",
            remedy=_REMEDY,
        )
    return reader(path)


def _reader_by_name(name: str) -> Callable[[Path], Contents] | None:
    if name in _SEALED_NAMES:
        return _sealed
    if name == LENGTHS:
        return _lengths
    if name in ("checkpoint", "checkpoint.old"):
        return _checkpoint
    if name.startswith("journal-"):
        return _journal
    if name == "lock":
        return _lock
    return _segment if segment_number(name) is not None else None


# -- small files ----------------------------------------------------------------------------------


def _sealed(path: Path) -> Contents:
    with path.open("rb") as file:
        kind = file.read(16)[8:].rstrip(b"\0")
    contents = Contents(kind="sealed file")
    contents.facts["of_kind"] = kind.decode("ascii", "replace")
    try:
        payload = read_sealed(path, _SEALED_NAMES.get(path.name, kind))
    except DirectoryError as error:
        contents.problems.append(str(error))
        return contents
    payload = payload or b""
    contents.facts["payload_bytes"] = len(payload)
    if kind in (b"format", b"gens"):
        contents.facts["number"] = int.from_bytes(payload, "little")
        return contents
    try:
        contents.facts["content"] = plain(msgpack.unpackb(payload, raw=False, strict_map_key=False))
    except ValueError:
        contents.facts["content"] = payload[:_HEX_MAX].hex()
    return contents


def _lock(path: Path) -> Contents:
    """The process that has it, or had it last, as the daemon writes it: its pid and a newline."""
    contents = Contents(kind="lock file of a daemon directory")
    with path.open("rb") as file:
        text = file.read(_LOCK_BYTES_MAX + 1)
    if text.strip().isdigit() and len(text) <= _LOCK_BYTES_MAX:
        contents.facts["pid_of_last_daemon"] = int(text)
    elif text:
        contents.problems.append(f"no pid: {text[:_LOCK_BYTES_MAX].hex()}")
    return contents


def plain(value: Any) -> Any:
    """`value` with bytes as hexadecimal text, for printing."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


# -- checkpoint and journal -----------------------------------------------------------------------


def _checkpoint(path: Path) -> Contents:
    contents = Contents(kind="checkpoint")
    try:
        found = read_checkpoint(path)
    except DirectoryError as error:
        contents.problems.append(str(error))
        return contents
    if found.directory_id:
        contents.facts |= {"number": found.number, "directory_id": found.directory_id.hex()}
    if found.state is CheckpointState.BAD:
        contents.problems.append(found.reason)
    if found.snapshot is not None:
        contents.facts |= _snapshot_facts(found.snapshot)
        contents.items = list(_pages(found.snapshot))
    return contents


def _snapshot_facts(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "last_generation": snapshot.last_generation,
        "pages": len(snapshot.pages),
        "families": [
            {"fingerprint": fingerprint.hex(), "generation": generation}
            for fingerprint, generation in snapshot.families
        ],
        "record_bytes_of_slab": {str(slab): size for slab, size in snapshot.classes.items()},
        "in_flight": list(snapshot.in_flight),
    }


def _pages(snapshot: Snapshot) -> Iterator[dict[str, Any]]:
    pages = snapshot.pages
    columns = {name: column.tolist() for name, column in pages.columns() if name != "key"}
    for row in range(len(pages)):
        page = {name: column[row] for name, column in columns.items()}
        yield {"page": row, "key": pages.key[row].tobytes().hex(), **page}


def _lengths(path: Path) -> Contents:
    contents = Contents(kind="lengths of journals")
    found = parse_lengths(path.read_bytes())
    contents.problems += [found.problem] if found.problem else []
    contents.items = [{"journal": number, "bytes": length} for number, length in found.of.items()]
    return contents


def _journal(path: Path) -> Contents:
    contents = Contents(kind="journal")
    try:
        found = read_journal(path)
        geometry = load_geometry(path.parent) if found.is_head_damaged else None
        if geometry is not None:
            # The sums of the frames need the directory's id, which the head has lost.
            found = read_journal(path, geometry.directory_id)
    except DirectoryError as error:
        contents.problems.append(str(error))
        return contents
    contents.facts = {
        "number": found.number,
        "directory_id": found.directory_id.hex(),
        "frames": found.frames,
    }
    if found.is_head_damaged:
        known = "" if found.directory_id else ", and the directory's id is not known here"
        contents.problems.append(f"its head is damaged{known}")
    if found.bad_frames > found.is_head_damaged:
        contents.problems.append(f"{found.bad_frames - found.is_head_damaged} damaged frames")
    if found.torn_bytes:
        contents.problems.append(f"a torn tail of {found.torn_bytes} bytes")
    contents.items = [_entry(entry) for entry in found.entries]
    return contents


def _entry(entry: Entry) -> dict[str, Any]:
    match entry:
        case Mark():
            device, local = split_slab(entry.slab)
            place = {"slab": entry.slab, "device": device, "segment": local}
            return {"entry": "MARK", **place, "record_bytes": entry.record_bytes}
        case Drop():
            return {"entry": "DROP", "generations": list(entry.generations)}
        case Known():
            lengths = [{"journal": number, "bytes": nbytes} for number, nbytes in entry.lengths]
            return {"entry": "KNOWN", "names": entry.names, "lengths": lengths}
        case Delete():
            return {
                "entry": "DELETE",
                "fingerprint": entry.fingerprint.hex(),
                "generation": entry.generation,
                "shard": entry.shard,
                "bound": entry.bound,
                "keys": [
                    entry.keys[at : at + _KEY_BYTES].hex()
                    for at in range(0, len(entry.keys), _KEY_BYTES)
                ],
            }


# -- segment and record ---------------------------------------------------------------------------


def _segment(path: Path) -> Contents:
    contents = Contents(kind="segment")
    with path.open("rb", buffering=_READ_BYTES) as file:
        try:
            _look_at_segment(file, path.stat().st_size, contents)
        except OSError as error:
            contents.problems.append(f"it cannot be read on: {error.strerror}")
    return contents


def _look_at_segment(file: BinaryIO, size: int, contents: Contents) -> None:
    try:
        header = decode_segment_header(file.read(SEGMENT_HEADER_BYTES))
    except CorruptRecord as error:
        contents.problems.append(str(error))
    else:
        contents.facts = {
            "directory_id": header.directory_id.hex(),
            "device": header.device,
            "segment": header.local,
            "segment_bytes": header.segment_bytes,
        }
        if size != SEGMENT_HEADER_BYTES + header.segment_bytes:
            contents.problems.append(f"it has {size} bytes, not those of its segment")
    at = SEGMENT_HEADER_BYTES
    while at + HEADER_BYTES <= size:
        file.seek(at)
        block = file.read(HEADER_BYTES)
        step = HEADER_BYTES
        if block[:8] == _RECORD_MAGIC:
            try:
                record = decode_header(block)
            except CorruptRecord as error:
                contents.problems.append(f"offset {at}: {error}")
            else:
                contents.items.append({"offset": at, **_header(record)})
                step = record_bytes(record.length)
        at += step


def _record(path: Path) -> Contents:
    contents = Contents(kind="record")
    blob = path.read_bytes()
    try:
        header = decode_header(blob)
    except CorruptRecord as error:
        contents.problems.append(str(error))
        return contents
    contents.facts = _header(header)
    payload = memoryview(blob)[HEADER_BYTES:][: header.length]
    if len(payload) < header.length:
        words = f"the payload is cut off: {len(payload)} of {header.length} bytes"
        contents.problems.append(words)
    elif not _is_intact(payload, header):
        contents.problems.append("the payload fails its payload_sum")
    return contents


def _is_intact(payload: memoryview, header: RecordHeader) -> bool:
    return verify_payload(
        payload,
        header.payload_sum,
        key=header.key,
        fingerprint=header.fingerprint,
        namespace_generation=header.namespace_generation,
        shard=header.shard,
        codec=header.codec,
        length=header.length,
    )


def _header(header: RecordHeader) -> dict[str, Any]:
    return {
        "key": header.key.hex(),
        "fingerprint": header.fingerprint.hex(),
        "namespace_generation": header.namespace_generation,
        "shard": header.shard,
        "length": header.length,
        "codec": header.codec.name.lower(),
        "lossy": header.lossy,
        "sequence": header.sequence,
        "tier": header.tier.name.lower(),
        "slot": header.slot,
        "boot_id": header.boot_id,
        "parent": header.parent.hex(),
        "depth": header.depth,
        "session": header.session,
        "ttl_ms": header.ttl_ms,
        "priority": header.priority,
        "created_ms": header.created_ms,
        "payload_sum": header.payload_sum.hex(),
        "origin_sum": header.origin_sum.hex(),
    }


_READERS: Final[dict[bytes, Callable[[Path], Contents]]] = {
    _SEALED_MAGIC: _sealed,
    CHECKPOINT_MAGIC: _checkpoint,
    JOURNAL_MAGIC: _journal,
    LENGTHS_MAGIC: _lengths,
    _SEGMENT_MAGIC: _segment,
    _RECORD_MAGIC: _record,
}
