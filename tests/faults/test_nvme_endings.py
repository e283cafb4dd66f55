"""The end of a daemon whose device hangs: the drain deadline, and a few seconds more."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from unittest import mock

import pytest

from kvtier.core.page import Tier
from kvtier.daemon import devices, nvme
from kvtier.testing.faulty_tier import FaultKind
from tests.faults.kinds_rig import (
    READ,
    WRITE,
    always,
    keys_of,
    on_loop,
    pages_of,
    put_on_disk,
    running,
    until,
)

DRAIN_S = 0.5
#: Below what a device that hangs is waited for anywhere else, and above all that is waited for
#: here on a loaded machine.
MORE_S = 6.0


def test_a_device_that_hangs_costs_the_end_some_seconds() -> None:
    """Movements end and threads are waited for twice: when the pages are saved, and at the end."""
    waits = 2 * nvme._END_MOVES_S + nvme._END_SYNC_S + devices._CLOSE_WAIT_S
    assert waits <= 6.0
    assert nvme._END_CHECKPOINT_S <= 5.0


@pytest.fixture
def hurried():
    """The same, sooner."""
    with (
        mock.patch.object(nvme, "_END_MOVES_S", 0.2),
        mock.patch.object(nvme, "_END_SYNC_S", 0.3),
        mock.patch.object(devices, "_CLOSE_WAIT_S", 0.3),
    ):
        yield


@pytest.mark.usefixtures("hurried")
@on_loop
async def test_the_end_keeps_its_time_with_a_device_that_hangs(base: Path) -> None:
    """Reads, writes, and all who wait behind them; calls that are under way hear of it."""
    on_disk, more = keys_of(range(6)), keys_of(range(6, 12))
    await put_on_disk(base, on_disk)
    settings = ("nvme.io_timeout_ms=600000", "nvme.io_threads=2", "nvme.clean_percent=100")
    async with running(base, *settings) as daemon:
        ns = await daemon.namespace()
        # A write that has come to rest, and needs a sync, which has to wait for a thread.
        put = await ns.put(more[:1], pages_of(more[:1]), durable="nvme")
        assert [item.durable for item in put] == [True]
        daemon.disk.plan(always(FaultKind.HANG, READ), always(FaultKind.HANG, WRITE))
        await ns.prefetch(on_disk)
        await ns.put(more[1:4], pages_of(more[1:4]))
        await ns.demote(more[1:2])
        waiting = asyncio.create_task(ns.put(more[4:], pages_of(more[4:]), durable="nvme"))
        await until(lambda: daemon.disk.hanging == 2 and daemon.counts(Tier.HOST).sealed == 6)

        began = time.monotonic()
        daemon.node.request_drain(DRAIN_S)
        await until(daemon.node.drain.done.is_set, within_s=DRAIN_S + MORE_S)
        assert daemon.node.drain.pages_lost == 5
        # The last thing that it does is to close the tier, which lets everything go on here.
        await until(lambda: daemon.disk.hanging == 0, within_s=DRAIN_S + MORE_S)
        assert time.monotonic() - began < DRAIN_S + MORE_S
        await asyncio.wait([waiting])

    async with running(base) as daemon:
        ns = await daemon.namespace()
        assert (await ns.lookup(on_disk)).prefix == 6, "what was durable is"
        assert (await ns.lookup(more[:1])).prefix == 1
        assert daemon.counts(Tier.NVME).sealed == 7
