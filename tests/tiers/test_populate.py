"""Slabs become real one after another, and running short of memory is said, not died of."""

from __future__ import annotations

import errno
import logging
import os
import threading

import pytest

from kvtier.testing.poison import POISON_BYTE
from kvtier.tiers.host import HostArena
from kvtier.tiers.memory import Headroom
from kvtier.tiers.populate import populate_write

MIB = 1 << 20
PLENTY = Headroom(free_bytes=1 << 50, limit="nothing")


@pytest.fixture
def arena():
    with HostArena(8 * MIB, slab_bytes=2 * MIB, huge_pages=False) as opened:
        yield opened


def resident_bytes(arena):
    return os.fstat(arena.fd).st_blocks * 512


def test_every_slab_in_order(arena, caplog):
    ready = []
    assert resident_bytes(arena) == 0
    with caplog.at_level(logging.INFO, "kvtier.tiers"):
        arena.start_populating(lambda index: ready.append((index, resident_bytes(arena))))
        assert arena.wait_populated(10.0)
    assert [index for index, _ in ready] == [0, 1, 2, 3]
    for index, resident in ready:
        assert resident >= (index + 1) * 2 * MIB
    assert (arena.ready_slabs, arena.degraded) == (4, "")
    assert [record.message for record in caplog.records] == ["host.arena.populated"]
    assert not arena.bytes.any()


def test_the_callback_sees_a_slab_as_ready_before_it_is_called(arena):
    seen = []
    arena.start_populating(lambda index: seen.append((index, arena.ready_slabs)))
    assert arena.wait_populated(10.0)
    assert seen == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_waiting_is_bounded_and_stopping_is_quick(arena):
    entered, gate, ready = threading.Event(), threading.Event(), []

    def slow(address, length):
        if ready:
            entered.set()
            gate.wait(10)
        return populate_write(address, length)

    arena.start_populating(ready.append, populate=slow)
    assert entered.wait(10)
    assert arena.wait_populated(0.01) is False
    stopper = threading.Thread(target=arena.stop_populating)
    stopper.start()
    gate.set()
    stopper.join(10)
    assert not stopper.is_alive()
    # Slab 1 may have been whole when the stop was seen, and was not announced all the same.
    assert ready == [0]
    assert (arena.ready_slabs, arena.degraded) == (1, "")


def test_going_on_after_a_stop(arena):
    first, rest = [], []
    arena.start_populating(first.append, headroom=lambda: PLENTY if len(first) < 2 else LOW)
    assert arena.wait_populated(10.0) is False
    assert arena.degraded
    arena.start_populating(rest.append)
    assert arena.wait_populated(10.0)
    assert (first, rest, arena.degraded) == ([0, 1], [2, 3], "")


LOW = Headroom(free_bytes=101 * MIB, limit="memory.max = 1 GiB of cgroup /pod")


def test_short_memory_stops_it_before_the_kernel_kills(arena, caplog):
    ready = []
    with caplog.at_level(logging.WARNING, "kvtier.tiers"):
        arena.start_populating(
            ready.append,
            headroom=lambda: PLENTY if not ready else LOW,
            reserve_bytes=100 * MIB,
        )
        assert arena.wait_populated(10.0) is False
    assert ready == [0]
    assert arena.degraded == (
        "1 of 4 slabs populated: memory.max = 1 GiB of cgroup /pod leaves 101.00 MiB, "
        "a slab and the reserve need 102.00 MiB"
    )
    assert [(r.message, r.reason) for r in caplog.records] == [
        ("host.arena.degraded", arena.degraded)
    ]
    assert 2 * MIB <= resident_bytes(arena) < 4 * MIB
    arena.write(0, [b"still good"])


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFAULT])
def test_a_failing_kernel_call_stops_it(arena, number):
    ready = []
    arena.start_populating(
        ready.append,
        headroom=lambda: PLENTY,
        populate=lambda *where: number if len(ready) == 3 else populate_write(*where),
    )
    assert arena.wait_populated(10.0) is False
    assert ready == [0, 1, 2]
    words = f"{os.strerror(number)} ({errno.errorcode[number]})"
    assert arena.degraded == f"3 of 4 slabs populated: {words}"


def test_an_old_kernel_is_touched_instead(arena):
    calls, ready = [], []

    def unknown(address, length):
        calls.append(length)
        return errno.EINVAL

    arena.start_populating(ready.append, headroom=lambda: PLENTY, populate=unknown)
    assert arena.wait_populated(10.0)
    assert (ready, len(calls)) == ([0, 1, 2, 3], 1)
    assert resident_bytes(arena) == 8 * MIB
    assert not arena.bytes.any()


def test_populating_keeps_bytes(arena):
    arena.write(100, [b"here before"])
    arena.start_populating(lambda _: None)
    assert arena.wait_populated(10.0)
    assert bytes(arena.view(100, 0, 11)) == b"here before"


def test_the_default_asks_the_machine(arena):
    arena.start_populating(lambda _: None, reserve_bytes=1 << 60)
    assert arena.wait_populated(10.0) is False
    assert arena.degraded.startswith("0 of 4 slabs populated: ")


def test_close_stops_it():
    arena = HostArena(8 * MIB, slab_bytes=2 * MIB, huge_pages=False)
    gate = threading.Event()
    threading.Timer(0.05, gate.set).start()

    def slow(address, length):
        gate.wait(10)
        return populate_write(address, length)

    ready = []
    arena.start_populating(ready.append, populate=slow)
    arena.close()
    assert [thread.name for thread in threading.enumerate() if "populate" in thread.name] == []
    assert ready == []


def test_poison():
    with HostArena(4 * MIB, slab_bytes=2 * MIB, huge_pages=False, poison=True) as arena:
        seen = []
        arena.start_populating(
            lambda index: seen.append(set(bytes(arena.view(index * 512, 0, 2 * MIB))))
        )
        assert arena.wait_populated(10.0)
        assert seen == [{POISON_BYTE}, {POISON_BYTE}]
        arena.write(3, [bytes(4096)])
        image = bytes(arena.view(2, 0, 3 * 4096))
        poison = bytes([POISON_BYTE]) * 4096
        assert image == poison + bytes(4096) + poison
