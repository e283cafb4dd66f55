"""What every tier must pass: subclass TierSuite in a test module and say how to make the tier.

    class TestHostTier(TierSuite):
        def make_tier(self, capacity_bytes: int, directory: Path) -> TierDevice:
            return HostArena(capacity_bytes)

Promise: each test opens its own tier and closes it. A tier passes if it does what
`kvtier.tiers.base` says. Thread rule: tests run in one thread except the one about threads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import TierIOError
from kvtier.testing.cells import check_page, make_page
from kvtier.testing.poison import POISON_BYTE, poison_bytes
from kvtier.tiers.base import SLOT_BYTES, Buffer, TierDevice

__all__ = ["PAGE_SIZES", "TierSuite"]

#: Around the edges of a slot, a size that is no multiple of anything, and a usual page.
PAGE_SIZES = (1, 4095, 4096, 4097, (64 << 10) + 8, 2 << 20)
_GUARD_BYTES = 3 * SLOT_BYTES


def _page(length: int, number: int, version: int = 1) -> bytes:
    return make_page(length, namespace="suite", key=b"page", version=version, page_no=number)


class TierSuite:
    """`write_unit_bytes`: what the medium rewrites around a write (1: just the bytes asked for)."""

    capacity_bytes = 16 << 20
    write_unit_bytes = 1

    def make_tier(self, capacity_bytes: int, directory: Path) -> TierDevice:
        """A new, empty tier of `capacity_bytes` or more; files go into `directory`."""
        raise NotImplementedError("a TierSuite says how to make its tier")

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[TierDevice]:
        device = self.make_tier(self.capacity_bytes, tmp_path)
        yield device
        device.close()

    @pytest.mark.parametrize("length", PAGE_SIZES)
    def test_round_trip(self, tier: TierDevice, length: int) -> None:
        page = _page(length, 1)
        tier.write(3, [page])
        assert read_back(tier, 3, 0, length) == page

    @pytest.mark.parametrize("length", PAGE_SIZES)
    def test_parts_are_joined(self, tier: TierDevice, length: int) -> None:
        """Header, payload in two pieces, an empty one: the parts of a record."""
        header, page = _page(4096, 1), _page(length, 2)
        cut = length // 3
        parts: list[Buffer] = [header, page[:cut], b"", np.frombuffer(page[cut:], dtype=np.uint8)]
        tier.write(5, parts)
        assert read_back(tier, 5, 0, 4096 + length) == header + page

    @pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 8192 + 24])
    @pytest.mark.parametrize("length", PAGE_SIZES)
    def test_neighbours_stay(self, tier: TierDevice, length: int, offset: int) -> None:
        slot, page = 8, _page(length, 1)
        start = slot * SLOT_BYTES + offset
        low = (start - _GUARD_BYTES) // SLOT_BYTES
        total = 2 * _GUARD_BYTES + offset + length + SLOT_BYTES
        tier.write(low, [poison_bytes(total)])
        tier.write(slot, [page], offset)
        image = read_back(tier, low, 0, total)
        at = start - low * SLOT_BYTES
        assert image[at : at + length] == page
        first = at - at % self.write_unit_bytes
        last = at + length + -(at + length) % self.write_unit_bytes
        assert set(image[:first]) == {POISON_BYTE}, "bytes before the range changed"
        assert set(image[last:]) == {POISON_BYTE}, "bytes after the range changed"

    def test_reads_at_any_offset(self, tier: TierDevice) -> None:
        page = _page(3 * SLOT_BYTES, 1)
        tier.write(2, [page])
        for offset, length in ((0, 1), (1, 4096), (4095, 2), (4097, 8191), (12287, 1)):
            expected = page[offset : offset + length]
            assert read_back(tier, 2, offset, length) == expected, (offset, length)

    def test_reads_into_any_buffer(self, tier: TierDevice) -> None:
        page = _page(SLOT_BYTES, 1)
        tier.write(0, [page])
        array = np.zeros((64, 32), dtype=np.float16)
        tier.read(0, 0, array)
        assert array.tobytes() == page
        larger = bytearray(poison_bytes(3 * SLOT_BYTES))
        tier.read(0, 0, memoryview(larger)[SLOT_BYTES : 2 * SLOT_BYTES])
        assert bytes(larger) == poison_bytes(SLOT_BYTES) + page + poison_bytes(SLOT_BYTES)

    def test_writing_leaves_the_source_alone(self, tier: TierDevice) -> None:
        source = bytearray(_page(SLOT_BYTES + 1, 1))
        tier.write(0, [source])
        assert bytes(source) == _page(SLOT_BYTES + 1, 1)
        source[:] = poison_bytes(len(source))
        assert read_back(tier, 0, 0, len(source)) == _page(SLOT_BYTES + 1, 1)

    def test_last_write_wins(self, tier: TierDevice) -> None:
        for version in range(5):
            tier.write(7, [_page(10_000, 1, version)])
        found = check_page(
            read_back(tier, 7, 0, 10_000), namespace="suite", key=b"page", version=4, page_no=1
        )
        assert found == []

    def test_many_slots_in_any_order(self, tier: TierDevice) -> None:
        seed = 20_240_607
        slots = list(range(0, tier.capacity_bytes // SLOT_BYTES - 2, 3))[:500]
        order = random.Random(seed)
        order.shuffle(slots)
        for slot in slots:
            tier.write(slot, [_page(3 * SLOT_BYTES - 17, slot)])
        order.shuffle(slots)
        for slot in slots:
            image = read_back(tier, slot, 0, 3 * SLOT_BYTES - 17)
            wrong = check_page(image, namespace="suite", key=b"page", version=1, page_no=slot)
            assert wrong == [], f"slot {slot}, seed {seed}: {wrong[0]}"

    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_against_a_byte_array(self, tier: TierDevice, seed: int) -> None:
        """Random writes and reads, overlapping and of any length, beside a plain bytearray."""
        source = random.Random(seed)
        model = bytearray(256 * SLOT_BYTES)
        tier.write(0, [model])
        for step in range(200):
            start = source.randrange(len(model))
            length = source.randrange(min(len(model) - start, 5 * SLOT_BYTES) + 1)
            slot, offset = divmod(start, SLOT_BYTES)
            back = source.randrange(slot + 1)  # the same place, named from an earlier slot
            slot, offset = slot - back, offset + back * SLOT_BYTES
            if source.random() < 0.5:
                model[start : start + length] = data = source.randbytes(length)
                tier.write(slot, [data], offset)
            else:
                expected = bytes(model[start : start + length])
                found = read_back(tier, slot, offset, length)
                assert found == expected, f"seed {seed}, step {step}, byte {start}"
        assert read_back(tier, 0, 0, len(model)) == model, f"seed {seed}"

    def test_the_last_byte(self, tier: TierDevice) -> None:
        last = tier.capacity_bytes // SLOT_BYTES - 1
        page = _page(SLOT_BYTES, 1)
        tier.write(last, [page])
        assert read_back(tier, last, 0, SLOT_BYTES) == page
        assert read_back(tier, last, 4095, 1) == page[-1:]

    def test_outside_is_refused(self, tier: TierDevice) -> None:
        end = tier.capacity_bytes // SLOT_BYTES
        before = read_back(tier, end - 1, 0, SLOT_BYTES)
        outside = (
            (-1, 0, 1), (end, 0, 1), (end - 1, 0, SLOT_BYTES + 1), (end - 1, SLOT_BYTES, 1),
            (0, -1, 2), (end - 1, -SLOT_BYTES, SLOT_BYTES), (1 << 52, 0, 1), (1 << 62, 0, 1),
            (0, 1 << 63, 1), (-(1 << 52), 0, 1),
        )  # fmt: skip
        for slot, offset, length in outside:
            with pytest.raises(TierIOError, match=rf"write failed at slot {slot}:"):
                tier.write(slot, [b"x" * length], offset)
            with pytest.raises(TierIOError, match=rf"read failed at slot {slot}:"):
                tier.read(slot, offset, bytearray(length))
        assert read_back(tier, end - 1, 0, SLOT_BYTES) == before

    def test_a_numpy_slot_does_not_wrap(self, tier: TierDevice) -> None:
        """A slot number from a uint32 table, times 4096, would come round to slot 0 in 32 bits."""
        with pytest.raises(TierIOError):
            tier.write(np.uint32(1 << 20), [b"x"])  # type: ignore[arg-type]

    def test_threads_on_their_own_slots(self, tier: TierDevice) -> None:
        length, threads, rounds = 3 * SLOT_BYTES - 8, 4, 30

        def work(number: int) -> str:
            slots = range(number * 3, tier.capacity_bytes // SLOT_BYTES - 2, threads * 3)
            for turn in range(rounds):
                slot = slots[turn % min(8, len(slots))]
                tier.write(slot, [_page(length, number, turn)])
                image = read_back(tier, slot, 0, length)
                wrong = check_page(
                    image, namespace="suite", key=b"page", version=turn, page_no=number
                )
                if wrong:
                    return f"thread {number}, round {turn}: {wrong[0]}"
            return ""

        with ThreadPoolExecutor(threads) as pool:
            assert list(pool.map(work, range(threads))) == [""] * threads

    def test_sync_keeps_the_bytes(self, tier: TierDevice) -> None:
        tier.write(1, [_page(5000, 1)])
        tier.sync()
        assert read_back(tier, 1, 0, 5000) == _page(5000, 1)

    def test_close_twice(self, tier: TierDevice) -> None:
        tier.close()
        tier.close()

    def test_use_after_close(self, tier: TierDevice) -> None:
        tier.close()
        with pytest.raises(TierIOError, match="closed"):
            tier.write(0, [b"x"])
        with pytest.raises(TierIOError, match="closed"):
            tier.read(0, 0, bytearray(1))
        with pytest.raises(TierIOError, match="closed"):
            tier.sync()

    def test_no_descriptor_is_left(self, tmp_path: Path) -> None:
        def cycle(number: int) -> None:
            directory = tmp_path / str(number)
            directory.mkdir()
            device = self.make_tier(self.capacity_bytes, directory)
            device.write(0, [b"x"])
            with pytest.raises(TierIOError):
                device.read(-1, 0, bytearray(1))
            device.close()

        cycle(0)  # what is opened once and kept is not a leak
        before = _open_descriptors()
        for number in range(1, 6):
            cycle(number)
        assert _open_descriptors() == before


def read_back(tier: TierDevice, slot: int, offset: int, length: int) -> bytes:
    """`length` bytes, read into poison, so that a byte that was not filled shows."""
    buffer = bytearray(poison_bytes(length))
    tier.read(slot, offset, buffer)
    return bytes(buffer)


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
