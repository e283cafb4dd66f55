"""A daemon directory with an NVMe tier of two devices, made of the real parts, for the commands
that look at files.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtier.core.namespaces import FamilyIdentity, Namespaces, ShardIdentity
from kvtier.core.page import Codec, Tier
from kvtier.daemon.state import open_directory
from kvtier.packing.checksum import payload_sum
from kvtier.packing.record import RecordHeader, encode_header, record_bytes
from kvtier.tiers.nvme import NvmeTier, open_device
from kvtier.tiers.nvme_checkpoint import write_checkpoint
from kvtier.tiers.nvme_geometry import Geometry, save_geometry, slab_number
from kvtier.tiers.nvme_journal import Delete, Drop, Entry, Journal, Mark
from kvtier.tiers.nvme_snapshot import Pages, Snapshot

ID = bytes(range(16))
FINGERPRINT = b"f" * 32
SEGMENT_BYTES = 64 << 10
UNITS = SEGMENT_BYTES // 4096
RECORD_BYTES = 12288


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * 8


def namespaces() -> Namespaces:
    found = Namespaces(namespaces_max=10)
    identity = FamilyIdentity(
        fingerprint=FINGERPRINT,
        tenant="acme",
        model_id="maker/model",
        weights_revision="r1",
        shard_count=1,
    )
    found.open(identity, ShardIdentity(index=0, layers=(0, 1), heads=(0, 1)))
    return found


def record_of(number: int, slot: int, *, generation: int = 0, session: str = "") -> list[bytes]:
    payload = random.Random(number).randbytes(5000 + number)
    identity = {
        "fingerprint": FINGERPRINT,
        "namespace_generation": 1,
        "shard": 0,
        "key": key_of(number),
        "codec": Codec.RAW,
        "length": len(payload),
    }
    header = RecordHeader(
        **identity,
        lossy=False,
        payload_sum=payload_sum(payload, **identity),
        generation=generation or number,
        sequence=generation or number,
        tier=Tier.NVME,
        slot=slot,
        session=session,
        boot_id=7,
        created_ms=0,
    )
    padding = bytes(record_bytes(len(payload)) - 4096 - len(payload))
    return [encode_header(header), payload, padding]


@dataclass
class TierFiles:
    """Pages 1 to 3 on device 0 and 4 to 6 on device 1 are in the checkpoint; page 7 was written to
    device 0 since; page 3 was deleted since, and 2 is there a second time with a newer record.
    """

    base: Path
    directory: Path = field(init=False)
    geometry: Geometry = field(init=False)

    def __post_init__(self) -> None:
        self.directory = self.base / "state"
        devices = tuple((number, self.base / f"device{number}") for number in (0, 1))
        self.geometry = Geometry(directory_id=ID, segment_bytes=SEGMENT_BYTES, devices=devices)
        with open_directory(self.directory) as directory:
            directory.journal_generations(1000)
            directory.save_namespaces(namespaces().to_state())
            save_geometry(self.directory, self.geometry)
            self._make_segments()
            asyncio.run(self._make_journals())

    def segment(self, device: int, local: int = 0) -> Path:
        return self.base / f"device{device}" / f"segment-{local:08d}"

    def slot(self, device: int, place: int) -> int:
        return slab_number(device, 0) * UNITS + place * RECORD_BYTES // 4096

    def offset(self, place: int) -> int:
        """Of a record in its segment file."""
        return 4096 + place * RECORD_BYTES

    @property
    def journal(self) -> Path:
        return self.directory / "journal-0000000002"

    def _make_segments(self) -> None:
        devices = [
            open_device(path, directory_id=ID, number=number, segment_bytes=SEGMENT_BYTES)
            for number, path in self.geometry.devices
        ]
        tier = NvmeTier(devices, segment_bytes=SEGMENT_BYTES)
        for number in (0, 1):
            tier.create_segment(slab_number(number, 0))
        tier.create_segment(slab_number(1, 1))  # never bound to a size
        for number in range(1, 7):
            slot = self.slot((number - 1) // 3, (number - 1) % 3)
            tier.write(slot, record_of(number, slot))
        slot = self.slot(0, 3)
        tier.write(slot, record_of(7, slot, session="plain \x1b[31m text"))
        slot = self.slot(0, 4)
        tier.write(slot, record_of(2, slot, generation=8))
        tier.close()

    async def _make_journals(self) -> None:
        for number, entries in ((1, []), (2, self.entries())):
            journal = await Journal.create(self.directory, number=number, directory_id=ID)
            await write_checkpoint(self.directory, self.snapshot(), number=number, directory_id=ID)
            for entry in entries:
                await journal.append([entry], sync=True)
            await journal.close()

    def entries(self) -> list[Entry]:
        return [
            Mark(slab_number(0, 0), RECORD_BYTES),
            Delete(FINGERPRINT, 1, 0, key_of(3), 8),
            Drop((99,)),
        ]

    def snapshot(self) -> Snapshot:
        numbers = range(1, 7)
        return Snapshot(
            last_generation=6,
            classes={slab_number(number, 0): RECORD_BYTES for number in (0, 1)},
            families=((FINGERPRINT, 1),),
            pages=Pages(
                family=np.zeros(6, np.uint32),
                shard=np.zeros(6, np.uint16),
                key=np.frombuffer(b"".join(map(key_of, numbers)), np.uint8).reshape(6, 32),
                generation=np.array(numbers, np.uint64),
                slot=np.array([self.slot(row // 3, row % 3) for row in range(6)], np.uint64),
                length=np.array([5000 + number for number in numbers], np.uint64),
                codec=np.ones(6, np.uint8),
                lossy=np.zeros(6, np.uint8),
                parent=np.full(6, -1, np.int32),
            ),
            in_flight=(),
        )


def flip(path: Path, at: int) -> None:
    blob = bytearray(path.read_bytes())
    blob[at] ^= 4
    path.write_bytes(blob)
