"""Tiers that are broken in one way each: the suite must fail them, and at the right test."""

from __future__ import annotations

from tests.testing.inner_pytest import outcomes, run_pytest

BROKEN = """
    import os
    from kvtier.errors import TierIOError
    from kvtier.testing.memory_tier import MemoryTier
    from kvtier.testing.tier_suite import TierSuite
    from kvtier.tiers.base import SLOT_BYTES, flat_bytes

    class Overrun(MemoryTier):
        def write(self, slot, parts, offset=0):
            super().write(slot, parts, offset)
            end = offset + sum(flat_bytes(part).nbytes for part in parts)
            if slot * SLOT_BYTES + end < self.capacity_bytes:
                super().write(slot, [b"!"], end)

    class DropsTheTail(MemoryTier):
        def write(self, slot, parts, offset=0):
            data = b"".join(flat_bytes(part) for part in parts)
            super().write(slot, [data[: len(data) // 512 * 512 or len(data)]], offset)

    class FirstPartOnly(MemoryTier):
        def write(self, slot, parts, offset=0):
            super().write(slot, parts[:1], offset)

    class Wraps(MemoryTier):
        def write(self, slot, parts, offset=0):
            super().write(int(slot) % (self.capacity_bytes // SLOT_BYTES), parts, offset)

    class FirstWriteWins(MemoryTier):
        seen = ()
        def write(self, slot, parts, offset=0):
            if (slot, offset) not in self.seen:
                super().write(slot, parts, offset)
                self.seen = {*self.seen, (slot, offset)}

    class KeepsTheSource(MemoryTier):
        kept = None
        def write(self, slot, parts, offset=0):
            super().write(slot, parts, offset)
            self.kept = (slot, parts, offset)
        def read(self, slot, offset, into):
            if self.kept and self.kept[0] == slot:
                super().write(*self.kept)
            super().read(slot, offset, into)

    class ReadsShort(MemoryTier):
        def read(self, slot, offset, into):
            target = flat_bytes(into)
            super().read(slot, offset, target[: max(1, len(target) - 1)])

    class UsableWhenClosed(MemoryTier):
        def close(self):
            pass

    class CloseRaises(MemoryTier):
        closed = False
        def close(self):
            if self.closed:
                raise RuntimeError("again")
            self.closed = True
            super().close()

    class LeaksDescriptors(MemoryTier):
        def __init__(self, capacity_bytes):
            super().__init__(capacity_bytes)
            self.number = os.open("/dev/null", os.O_RDONLY)

    class RaisesPlainErrors(MemoryTier):
        def read(self, slot, offset, into):
            try:
                super().read(slot, offset, into)
            except TierIOError as error:
                raise error.__cause__

    class SharesScratch(MemoryTier):
        scratch = bytearray(1 << 22)
        def write(self, slot, parts, offset=0):
            data = b"".join(flat_bytes(part) for part in parts)
            self.scratch[: len(data)] = data
            if len(data) == 3 * SLOT_BYTES - 8:
                os.sched_yield()
                __import__("time").sleep(0.0005)
            super().write(slot, [bytes(self.scratch[: len(data)])], offset)

    def suite_of(kind):
        return type("Test" + kind.__name__, (TierSuite,), {
            "make_tier": lambda self, capacity_bytes, directory: kind(capacity_bytes)})

    for kind in list(globals().values()):
        if isinstance(kind, type) and issubclass(kind, MemoryTier):
            made = suite_of(kind)
            globals()[made.__name__] = made
    del made
"""

#: Tier -> a test that has to fail for it.
CAUGHT_BY = {
    "Overrun": "test_neighbours_stay[4096-0]",
    "DropsTheTail": "test_round_trip[4097]",
    "FirstPartOnly": "test_parts_are_joined[4096]",
    "Wraps": "test_outside_is_refused",
    "FirstWriteWins": "test_last_write_wins",
    "KeepsTheSource": "test_writing_leaves_the_source_alone",
    "ReadsShort": "test_round_trip[4096]",
    "UsableWhenClosed": "test_use_after_close",
    "CloseRaises": "test_close_twice",
    "LeaksDescriptors": "test_no_descriptor_is_left",
    "RaisesPlainErrors": "test_outside_is_refused",
    "SharesScratch": "test_threads_on_their_own_slots",
}


def test_every_broken_tier_is_caught(tmp_path):
    """Beside each of them the sound tier, which must pass the same test."""
    broken = [f"Test{tier}::{test}" for tier, test in CAUGHT_BY.items()]
    sound = [f"TestMemoryTier::{test}" for test in sorted(set(CAUGHT_BY.values()))]
    done = run_pytest(tmp_path, BROKEN, *(f"test_it.py::{name}" for name in broken + sound))
    assert outcomes(done, "FAILED") == set(broken), done.stdout + done.stderr
    assert outcomes(done, "PASSED") == set(sound)
