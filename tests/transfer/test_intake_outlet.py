"""Intake and Outlet over a real arena: what is stored, what is refused, what is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvtier.core.generations import Generations
from kvtier.core.page import NO_SUM, Codec, GetCode, PageMeta, PutCode, Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from kvtier.errors import ChunkError, KeyLengthError, LimitExceeded
from kvtier.packing.checksum import payload_sum
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment
from kvtier.packing.record import HEADER_BYTES
from kvtier.tiers.host import HostArena
from kvtier.transfer.intake import Intake
from kvtier.transfer.outlet import Outlet
from kvtier.transfer.place import Place, Verify

SLAB = 256 * 1024
LAYOUT = Layout.from_segments(
    [
        Segment(
            name=name,
            role=role,
            dtype="bfloat16",
            layers=2,
            heads=2,
            dim=8,
            scale_rule=ScaleRule.LAYER_HEAD,
        )
        for name, role in (("k", Role.KEY), ("v", Role.VALUE))
    ],
    model_id="m",
    revision="1",
    page_tokens=16,
    kv_compute="bfloat16",
)
RAW = LAYOUT.raw_bytes


@dataclass
class Rig:
    store: Store
    arena: HostArena
    place: Place

    def intake(
        self, *, pages_max: int = 100, bytes_max: int = 1 << 20, verify: Verify = Verify.ALWAYS
    ) -> Intake:
        return Intake(
            self.store,
            self.arena,
            self.place,
            pages_max=pages_max,
            bytes_max=bytes_max,
            verify=verify,
        )

    def put(self, *pages: tuple[PageMeta, bytes]) -> list[PutCode]:
        intake = self.intake()
        intake.announce([meta for meta, _ in pages])
        intake.feed(0, memoryview(b"".join(payload for _, payload in pages)))
        intake.finish()
        intake.close()
        return intake.codes

    def get(self, *keys: bytes, **how: object) -> list[tuple[GetCode, bytes]]:
        options: dict[str, Any] = {
            "accept": frozenset({Codec.RAW}),
            "lossy_ok": False,
            "verify": Verify.ALWAYS,
            "sample_one_in": 1,
        } | how
        array = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)

        async def read() -> list[tuple[GetCode, bytes]]:
            async with Outlet(self.store, self.arena, self.place, array, **options) as outlet:
                return [(page.code, bytes(page.payload or b"")) async for page in outlet]

        return asyncio.run(read())


@pytest.fixture
def rig() -> Iterator[Rig]:
    with HostArena(SLAB, slab_bytes=SLAB, huge_pages=False, poison=True) as arena:
        store = Store(
            StoreConfig(boot_id=5, pages_max=64, seed=1),
            tiers={Tier.HOST: SlabAllocator(slab_bytes=SLAB, numbers=range(1))},
            generations=Generations(0, lambda bound: None),
        )
        store.room.grant(Tier.HOST, 0)
        store.open_namespace(3, 1)
        place = Place(
            namespace=3,
            shard=0,
            fingerprint=LAYOUT.fingerprint("t", b""),
            generation=1,
            layout=LAYOUT,
        )
        yield Rig(store, arena, place)
        counts = store.status()[Tier.HOST]
        assert (counts.filling, counts.pinned, counts.retiring) == (0, 0, 0)
        store.survey.check()


def page(
    place: Place, n: int, payload: bytes | None = None, **more: object
) -> tuple[PageMeta, bytes]:
    if payload is None:
        payload = bytes([n]) * RAW
    codec = more.get("codec", Codec.RAW)
    assert isinstance(codec, Codec)
    key = bytes([n]) * 32
    made = payload_sum(
        payload,
        key=key,
        fingerprint=place.fingerprint,
        namespace_generation=place.generation,
        shard=place.shard,
        codec=codec,
        length=len(payload),
    )
    meta = PageMeta(key=key, length=len(payload), codec=codec, payload_sum=made)
    return replace(meta, **more), payload  # type: ignore[arg-type]


def fp8_payload(scale: float) -> bytes:
    """Zeros as codes; one scale is `scale`, the others 1."""
    offset, count = LAYOUT.scales_span
    packed = bytearray(LAYOUT.fp8_bytes)
    scales = np.ones(count, "<f4")
    scales[3] = scale
    packed[offset : offset + 4 * count] = scales.tobytes()
    return bytes(packed)


def test_what_comes_back_is_what_was_put(rig: Rig) -> None:
    assert rig.put(page(rig.place, 1), page(rig.place, 2)) == [PutCode.STORED] * 2
    assert rig.get(b"\x01" * 32, b"\x09" * 32, b"\x02" * 32) == [
        (GetCode.HIT, b"\x01" * RAW),
        (GetCode.MISS, b""),
        (GetCode.HIT, b"\x02" * RAW),
    ]


@pytest.mark.parametrize("length", [0, 1, RAW - 1, RAW + 1, 2 * RAW])
def test_a_page_of_another_length_is_refused_alone(rig: Rig, length: int) -> None:
    codes = rig.put(page(rig.place, 1), page(rig.place, 2, bytes(length)), page(rig.place, 3))
    assert codes == [PutCode.STORED, PutCode.REFUSED, PutCode.STORED]
    assert [code for code, _ in rig.get(*(bytes([n]) * 32 for n in (1, 2, 3)))] == [
        GetCode.HIT,
        GetCode.MISS,
        GetCode.HIT,
    ]


def test_a_put_of_nothing_but_empty_pages_ends(rig: Rig) -> None:
    assert rig.put(page(rig.place, 1, b""), page(rig.place, 2, b"")) == [PutCode.REFUSED] * 2


def test_sums_over_other_bytes_or_another_identity_are_refused(rig: Rig) -> None:
    meta, payload = page(rig.place, 1)
    damaged = bytearray(payload)
    damaged[-1] ^= 1
    assert rig.put((meta, bytes(damaged))) == [PutCode.REFUSED]
    assert rig.put((replace(meta, key=b"\x02" * 32), payload)) == [PutCode.REFUSED]
    assert rig.put((replace(meta, payload_sum=NO_SUM), payload)) == [PutCode.REFUSED]
    for other in (
        replace(rig.place, generation=2),
        replace(rig.place, shard=1),
        replace(rig.place, fingerprint=bytes(32)),
    ):
        assert rig.put((page(other, 1)[0], payload)) == [PutCode.REFUSED]
    assert rig.get(b"\x01" * 32) == [(GetCode.MISS, b"")]


def test_a_key_twice_in_one_put_is_stored_once(rig: Rig) -> None:
    codes = rig.put(page(rig.place, 1), page(rig.place, 1), page(rig.place, 1))
    assert codes == [PutCode.STORED, PutCode.EXISTS, PutCode.EXISTS]


@pytest.mark.parametrize("offset", [1, RAW - 1, RAW + 1, 2**63])
def test_a_chunk_at_a_wrong_offset_ends_the_put(rig: Rig, offset: int) -> None:
    intake = rig.intake()
    meta, payload = page(rig.place, 1)
    intake.announce([meta])
    with pytest.raises(ChunkError, match=f"offset {offset}, expected 0"):
        intake.feed(offset, memoryview(payload))
    intake.close()


def test_missing_and_surplus_bytes_end_the_put_and_keep_what_was_whole(rig: Rig) -> None:
    intake = rig.intake()
    pages = [page(rig.place, n) for n in (1, 2)]
    intake.announce([meta for meta, _ in pages])
    intake.feed(0, memoryview(b"".join(payload for _, payload in pages)[: 2 * RAW - 1]))
    with pytest.raises(ChunkError, match=f"ended after {2 * RAW - 1} of {2 * RAW} bytes"):
        intake.finish()
    intake.close()
    assert [code for code, _ in rig.get(b"\x01" * 32, b"\x02" * 32)] == [GetCode.HIT, GetCode.MISS]
    second = rig.intake()
    with pytest.raises(ChunkError, match="1 bytes sent, 0 announced"):
        second.feed(0, memoryview(b"x"))
    second.close()


def test_limits_are_named_and_nothing_is_taken(rig: Rig) -> None:
    meta, _ = page(rig.place, 1)
    intake = rig.intake(pages_max=2, bytes_max=RAW)
    with pytest.raises(LimitExceeded, match="3 pages"):
        intake.announce([meta] * 3)
    with pytest.raises(LimitExceeded, match=f"{2 * RAW} bytes"):
        intake.announce([meta] * 2)
    with pytest.raises(LimitExceeded):
        intake.announce([replace(meta, length=2**63)])
    with pytest.raises(KeyLengthError, match="page 0: key of 31 bytes"):
        intake.announce([replace(meta, key=bytes(31))])
    with pytest.raises(KeyLengthError, match="parent of 1"):
        intake.announce([replace(meta, parent=b"x")])
    intake.announce([meta])
    intake.close()


def test_every_damaged_bit_of_a_record_makes_it_corrupt_and_then_a_miss(rig: Rig) -> None:
    rng = np.random.default_rng(11)
    places = [*range(0, 500, 7), *range(4088, 4096)]
    places += [HEADER_BYTES + int(n) for n in rng.integers(0, RAW, 60)]
    for at in places:
        assert rig.put(page(rig.place, 1)) == [PutCode.STORED]
        (reading,) = rig.store.acquire(3, 0, np.full((1, 32), 1, np.uint8))
        assert not isinstance(reading, GetCode)
        rig.arena.view(reading.ref.slot, at, 1)[0] ^= 1 << int(rng.integers(0, 8))
        reading.release()
        assert rig.get(b"\x01" * 32) == [(GetCode.CORRUPT, b"")], f"byte {at}, seed 11"
        assert rig.get(b"\x01" * 32) == [(GetCode.MISS, b"")]


def test_swapped_records_are_corrupt(rig: Rig) -> None:
    rig.put(page(rig.place, 1), page(rig.place, 2))
    array = np.array([[1] * 32, [2] * 32], np.uint8)
    slots = []
    for reading in rig.store.acquire(3, 0, array):
        assert not isinstance(reading, GetCode)
        slots.append(reading.ref.slot)
        reading.release()
    one, two = (rig.arena.view(slot, 0, HEADER_BYTES + RAW) for slot in slots)
    keep = bytes(one)
    one[:] = two
    two[:] = keep
    assert [code for code, _ in rig.get(b"\x01" * 32, b"\x02" * 32)] == [GetCode.CORRUPT] * 2


def test_a_lossy_or_unreadable_copy_is_a_miss(rig: Rig) -> None:
    meta, payload = page(
        rig.place, 1, fp8_payload(1.0), codec=Codec.FP8, lossy=True, origin_sum=b"o" * 16
    )
    assert rig.put((meta, payload)) == [PutCode.STORED]
    both = frozenset(Codec)
    assert rig.get(b"\x01" * 32) == [(GetCode.MISS, b"")]
    assert rig.get(b"\x01" * 32, accept=both) == [(GetCode.MISS, b"")]
    assert rig.get(b"\x01" * 32, accept=frozenset({Codec.RAW}), lossy_ok=True)[0][0] is GetCode.MISS
    assert rig.get(b"\x01" * 32, accept=both, lossy_ok=True) == [(GetCode.HIT, payload)]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-45])
def test_fp8_pages_with_bad_scales_are_nonfinite(rig: Rig, scale: float) -> None:
    meta, payload = page(
        rig.place, 1, fp8_payload(scale), codec=Codec.FP8, lossy=True, origin_sum=b"o" * 16
    )
    assert rig.put((meta, payload)) == [PutCode.NONFINITE]
    assert rig.get(b"\x01" * 32, accept=frozenset(Codec), lossy_ok=True)[0][0] is GetCode.MISS


def test_verify_off_still_checks_the_header_and_sampled_checks_some(rig: Rig) -> None:
    for n in range(1, 9):
        rig.put(page(rig.place, n))
    keys = [bytes([n]) * 32 for n in range(1, 9)]
    array = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
    for reading in rig.store.acquire(3, 0, array):
        assert not isinstance(reading, GetCode)
        rig.arena.view(reading.ref.slot, HEADER_BYTES, 1)[0] ^= 1
        reading.release()
    off = [code for code, _ in rig.get(*keys, verify=Verify.OFF)]
    assert off == [GetCode.HIT] * 8
    sampled = [code for code, _ in rig.get(*keys, verify=Verify.SAMPLED, sample_one_in=4)]
    assert sampled.count(GetCode.CORRUPT) == 2


def test_an_outlet_closed_half_way_holds_nothing(rig: Rig) -> None:
    rig.put(*(page(rig.place, n) for n in range(1, 9)))
    array = np.frombuffer(b"".join(bytes([n]) * 32 for n in range(1, 9)), np.uint8)

    async def read_three() -> None:
        outlet = Outlet(
            rig.store,
            rig.arena,
            rig.place,
            array.reshape(-1, 32),
            accept=frozenset({Codec.RAW}),
            lossy_ok=False,
            verify=Verify.ALWAYS,
            sample_one_in=1,
        )
        pages = aiter(outlet)
        for _ in range(3):
            assert (await anext(pages)).code is GetCode.HIT
        assert rig.store.status()[Tier.HOST].pinned > 0
        await outlet.close()

    asyncio.run(read_three())
    assert rig.store.status()[Tier.HOST].pinned == 0
