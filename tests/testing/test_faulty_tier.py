"""Each planned fault happens, does what it says and no more, and is on record."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from kvtier.errors import TierIOError
from kvtier.testing.cells import check_page, make_page
from kvtier.testing.faulty_tier import READ, SYNC, WRITE, Fault, FaultKind, FaultyTier, Injection
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.sim_clock import SimClock
from kvtier.testing.tier_suite import TierSuite, read_back
from kvtier.tiers.base import errno_of

SEED = 11
OLD = b"o" * 10_000
NEW = b"n" * 10_000


class TestFaultyTierWithoutFaults(TierSuite):
    def make_tier(self, capacity_bytes, directory):
        return FaultyTier(MemoryTier(capacity_bytes), seed=SEED)


class TestFaultyTierThatKeepsUnsynced(TierSuite):
    def make_tier(self, capacity_bytes, directory):
        return FaultyTier(MemoryTier(capacity_bytes), seed=SEED, keeps_unsynced=True)


def make(*faults, seed=SEED, **more):
    """A tier with OLD at slot 1, written before any fault is counted."""
    inner = MemoryTier(1 << 20)
    inner.write(1, [OLD])
    return FaultyTier(inner, faults, seed=seed, **more)


def at_rest(tier, length=10_000):
    return read_back(tier.inner, 1, 0, length)


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (FaultKind.EIO, errno.EIO),
        (FaultKind.ENOSPC, errno.ENOSPC),
        (FaultKind.EDQUOT, errno.EDQUOT),
    ],
)
def test_the_nth_write_fails_and_writes_nothing(kind, number):
    tier = make(Fault(kind=kind, nth=2))
    tier.write(1, [b"first"])
    with pytest.raises(TierIOError, match="nvme tier: write failed at slot 1") as caught:
        tier.write(1, [NEW], 7)
    assert errno_of(caught.value) == number
    assert at_rest(tier) == b"first" + OLD[5:]
    tier.write(1, [NEW])
    assert at_rest(tier) == NEW
    assert tier.injected == [
        Injection(kind=kind, operation=WRITE, call=2, slot=1, offset=7, length=10_000)
    ]
    assert (tier.count(kind), tier.count(FaultKind.FLIP)) == (1, 0)
    assert tier.calls == {WRITE: 3, READ: 0, SYNC: 0}


def test_a_read_fails():
    tier = make(Fault(kind=FaultKind.EIO, operation=READ, nth=1))
    buffer = bytearray(b"\xa5" * 10)
    with pytest.raises(TierIOError, match="read failed at slot 1"):
        tier.read(1, 0, buffer)
    assert bytes(buffer) == b"\xa5" * 10
    assert read_back(tier, 1, 0, 10) == OLD[:10]


def test_a_short_write_says_so():
    tier = make(Fault(kind=FaultKind.SHORT, nth=1))
    with pytest.raises(TierIOError, match="short write of") as caught:
        tier.write(1, [NEW[:4000], NEW[4000:]])
    assert errno_of(caught.value) == errno.EIO
    count = tier.injected[0].detail
    assert 0 <= count < len(NEW)
    assert at_rest(tier) == NEW[:count] + OLD[count:]


def test_a_torn_write_does_not_say_so():
    tier = make(Fault(kind=FaultKind.TORN, nth=1))
    tier.write(1, [NEW])
    count = tier.injected[0].detail
    assert at_rest(tier) == NEW[:count] + OLD[count:] != NEW


def test_a_short_read_says_so():
    tier = make(Fault(kind=FaultKind.SHORT, operation=READ, nth=1))
    buffer = bytearray(b"\xa5" * len(OLD))
    with pytest.raises(TierIOError, match="short read of"):
        tier.read(1, 0, buffer)
    count = tier.injected[0].detail
    assert bytes(buffer) == OLD[:count] + b"\xa5" * (len(OLD) - count)


def bits_changed(a, b):
    return [at * 8 + bit for at in range(len(a)) for bit in range(8) if (a[at] ^ b[at]) >> bit & 1]


def test_a_flip_on_read_leaves_what_lies_there():
    tier = make(Fault(kind=FaultKind.FLIP, operation=READ, nth=1))
    got = read_back(tier, 1, 0, len(OLD))
    assert bits_changed(got, OLD) == [tier.injected[0].detail]
    assert at_rest(tier) == OLD == read_back(tier, 1, 0, len(OLD))


def test_a_flip_on_write_comes_to_rest():
    source = bytearray(NEW)
    tier = make(Fault(kind=FaultKind.FLIP, nth=1))
    tier.write(1, [source])
    assert bytes(source) == NEW
    assert bits_changed(at_rest(tier), NEW) == [tier.injected[0].detail]


def test_a_flip_at_rest():
    tier = make()
    bit = tier.flip_at_rest(1, 100, 50)
    assert bits_changed(at_rest(tier), OLD) == [800 + bit]
    assert bit < 400
    assert tier.injected == [
        Injection(
            kind=FaultKind.FLIP, operation=WRITE, call=0, slot=1, offset=100, length=50, detail=bit
        )
    ]


def test_slow_goes_through_the_clock():
    clock = SimClock(seed=SEED, start_s=0.0)
    slow = Fault(kind=FaultKind.SLOW, operation=READ, nth=2, delay_s=30.0)
    tier = make(slow, sleep=clock.sleep)
    began = time.monotonic()
    times = []
    for _ in range(3):
        assert read_back(tier, 1, 0, 10) == OLD[:10]
        times.append(clock.monotonic())
    assert times == [0.0, 30.0, 30.0]
    assert time.monotonic() - began < 5
    assert tier.count(FaultKind.SLOW) == 1


def test_a_hang_lasts_until_released():
    tier = make(Fault(kind=FaultKind.HANG, nth=1))
    thread = threading.Thread(target=tier.write, args=(1, [NEW]))
    thread.start()
    deadline = time.monotonic() + 10
    while not tier.hanging and time.monotonic() < deadline:
        time.sleep(0.001)
    assert tier.hanging == 1
    assert at_rest(tier) == OLD
    tier.write(100, [b"others go on"])
    tier.release()
    thread.join(10)
    assert not thread.is_alive()
    assert (tier.hanging, at_rest(tier)) == (0, NEW)


def test_a_hang_that_nobody_releases_fails_the_test():
    tier = make(Fault(kind=FaultKind.HANG, operation=SYNC, nth=1))
    tier.hang_max_s = 0.05
    with pytest.raises(TierIOError, match=r"nobody released it in 0.05 s \(ETIMEDOUT\)"):
        tier.sync()
    assert tier.hanging == 0


def test_close_releases_what_hangs():
    tier = make(Fault(kind=FaultKind.HANG, operation=READ, nth=1))
    errors = []

    def read():
        try:
            tier.read(1, 0, bytearray(1))
        except TierIOError as error:
            errors.append(errno_of(error))

    thread = threading.Thread(target=read)
    thread.start()
    deadline = time.monotonic() + 10
    while not tier.hanging and time.monotonic() < deadline:
        time.sleep(0.001)
    tier.close()
    thread.join(10)
    assert errors == [errno.EBADF]


def test_a_late_write_lands_on_the_next_owner():
    """The fault that generations are for: kvtier must notice, and the cells say whose bytes they
    are."""
    first = {"namespace": "n", "key": b"first", "version": 1}
    second = {"namespace": "n", "key": b"second", "version": 2}
    tier = make(Fault(kind=FaultKind.LATE, nth=1))
    with pytest.raises(TierIOError) as caught:
        tier.write(1, [make_page(4096, **first)])
    assert errno_of(caught.value) == errno.ETIMEDOUT
    assert at_rest(tier) == OLD
    tier.write(1, [make_page(8192, **second)])
    assert check_page(at_rest(tier, 8192), **second) == []
    assert tier.land() == 1
    found = check_page(at_rest(tier, 8192), **second)
    assert [(run.first, run.cells, run.owner.key) for run in found] == [(0, 64, "first")]
    assert tier.land() == 0


def test_a_duplicate_write_undoes_a_later_one():
    tier = make(Fault(kind=FaultKind.DUPLICATE, nth=1))
    tier.write(1, [NEW])
    assert at_rest(tier) == NEW
    tier.write(1, [OLD])
    assert tier.land() == 1
    assert at_rest(tier) == NEW
    assert [injection.kind for injection in tier.injected] == [FaultKind.DUPLICATE]


def test_a_power_cut_loses_what_was_not_synced():
    tier = make(keeps_unsynced=True)
    tier.write(1, [b"synced"])
    tier.sync()
    tier.write(1, [NEW])
    tier.write(1, [b"again"], 3)
    assert tier.power_cut() == 4
    with pytest.raises(TierIOError, match="the power is off"):
        tier.read(1, 0, bytearray(1))
    with pytest.raises(TierIOError, match="the power is off"):
        tier.write(1, [b"x"])
    tier.power_on()
    assert read_back(tier, 1, 0, len(OLD)) == b"synced" + OLD[6:]
    assert tier.power_cut() == 0
    assert tier.count(FaultKind.POWER_CUT) == 2


def test_a_failed_sync_covers_nothing():
    tier = make(Fault(kind=FaultKind.EIO, operation=SYNC, nth=1), keeps_unsynced=True)
    tier.write(1, [NEW])
    with pytest.raises(TierIOError, match="nvme tier: sync failed"):
        tier.sync()
    tier.power_cut()
    assert at_rest(tier) == OLD


def test_blocks_survive_a_power_cut_each_for_itself():
    """Some seed keeps a later block and loses an earlier one of the same write."""
    seen = set()
    for seed in range(40):
        tier = make(seed=seed, keeps_unsynced=True)
        tier.write(1, [NEW[:8192]])
        lost = tier.power_cut(survival=0.5)
        image = at_rest(tier, 8192)
        blocks = (image[:4096], image[4096:])
        assert set(blocks) <= {OLD[:4096], NEW[:4096]}, f"seed {seed}"
        assert lost == blocks.count(OLD[:4096])
        seen.add(tuple(block == NEW[:4096] for block in blocks))
    assert seen == {(False, False), (False, True), (True, False), (True, True)}


def test_a_power_cut_by_plan():
    tier = make(Fault(kind=FaultKind.POWER_CUT, nth=2), keeps_unsynced=True)
    tier.write(1, [NEW])
    with pytest.raises(TierIOError, match="the power is off"):
        tier.write(5, [NEW])
    assert at_rest(tier, 20_000) == OLD + bytes(20_000 - len(OLD))
    assert tier.injected[0].kind is FaultKind.POWER_CUT


def test_a_power_cut_needs_a_record():
    with pytest.raises(ValueError, match="keeps_unsynced"):
        make().power_cut()


def faults_of(seed, calls=400):
    plan = [
        Fault(kind=FaultKind.EIO, probability=0.1),
        Fault(kind=FaultKind.FLIP, probability=0.05, times_max=3),
        Fault(kind=FaultKind.SHORT, operation=READ, probability=0.02),
    ]
    tier = make(*plan, seed=seed)
    failed = 0
    for _ in range(calls):
        for act in (lambda: tier.write(1, [b"data"]), lambda: tier.read(1, 0, bytearray(4))):
            try:
                act()
            except TierIOError:
                failed += 1
    assert failed == tier.count(FaultKind.EIO) + tier.count(FaultKind.SHORT)
    return tier.injected


def test_the_seed_decides():
    found = {seed: faults_of(seed) for seed in range(5)}
    assert all(faults_of(seed) == injected for seed, injected in found.items())
    assert len({tuple(injected) for injected in found.values()}) == 5
    for seed, injected in found.items():
        counts = {kind: sum(i.kind is kind for i in injected) for kind in FaultKind}
        assert 20 <= counts[FaultKind.EIO] <= 60, f"seed {seed}"
        assert counts[FaultKind.FLIP] == 3, f"seed {seed}"
        assert 1 <= counts[FaultKind.SHORT] <= 20, f"seed {seed}"


def test_a_call_has_one_outcome_and_any_stall():
    clock = SimClock(seed=SEED, start_s=0.0)
    tier = make(
        Fault(kind=FaultKind.FLIP, nth=1),
        Fault(kind=FaultKind.SLOW, nth=1, delay_s=2.0),
        Fault(kind=FaultKind.EIO, nth=1),
        sleep=clock.sleep,
    )
    tier.write(1, [NEW])
    assert [injection.kind for injection in tier.injected] == [FaultKind.SLOW, FaultKind.FLIP]
    assert clock.monotonic() == 2.0


@pytest.mark.parametrize(
    "plan",
    [
        {"kind": FaultKind.EIO},
        {"kind": FaultKind.EIO, "nth": 1, "probability": 0.5},
        {"kind": FaultKind.ENOSPC, "operation": READ, "nth": 1},
        {"kind": FaultKind.LATE, "operation": READ, "nth": 1},
        {"kind": FaultKind.FLIP, "operation": SYNC, "nth": 1},
    ],
)
def test_a_plan_that_makes_no_sense(plan):
    with pytest.raises(ValueError, match=r"a fault has|does not happen"):
        Fault(**plan)
