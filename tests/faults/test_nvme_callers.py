"""Calls that overlap, give up or fail half-way: what was answered holds after a kill, and nothing
is forgotten.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from kvtier.core.page import DeleteCode, GetCode, Tier
from kvtier.daemon import services_pages
from kvtier.errors import DirectoryError
from kvtier.testing.faulty_tier import Fault, FaultKind
from kvtier.tiers.nvme import NvmeDevice
from tests.faults.kinds_rig import (
    Running,
    get_checked,
    keys_of,
    on_loop,
    opaque,
    pages_of,
    poisoned,
    running,
    until,
    wrong_cells,
)

HIT, MISS = GetCode.HIT, GetCode.MISS


@on_loop
async def test_a_page_put_while_a_long_delete_has_passed_its_key_survives(base: Path) -> None:
    """The delete is of thousands of keys, slice by slice; what it journals is of its own moment."""
    (passed,), rest = keys_of(["passed"]), keys_of(range(3000))
    async with running(base) as daemon:
        ns = await daemon.namespace()
        given = await ns.put([*rest[:4], passed], pages_of([*rest[:4], passed]), durable="nvme")
        given.raise_for_refused()
        goes_on, slices = asyncio.Event(), []

        async def pause(_: float) -> None:
            slices.append(daemon.copies(ns, passed))
            await goes_on.wait()

        # The last keys go first.
        with mock.patch.object(services_pages, "asyncio", SimpleNamespace(sleep=pause)):
            deleting = asyncio.create_task(ns.delete([*rest, passed]))
            await until(lambda: slices)
            assert slices == [{}]
            (again,) = await ns.put([passed], pages_of([passed], version=2), durable="nvme")
            assert again.durable
            assert not deleting.done()
            goes_on.set()
            deleted = await deleting
        assert deleted.count(DeleteCode.DELETED) == 5
        assert (await ns.lookup([passed])).prefix == 1
    async with running(base) as daemon:
        ns = await daemon.namespace()
        out = poisoned(1)
        assert (await ns.get([passed], out=out)).reasons == [HIT]
        assert wrong_cells(out[0].data, passed, version=2) == []
        assert (await ns.lookup(rest[:4])).reasons == [MISS] * 4


def session_of(daemon: Running) -> int:
    (session,) = daemon.node.sessions
    return session.session_id


@on_loop
async def test_a_flush_whose_caller_went_away_forgets_nothing(base: Path) -> None:
    """Neither what it had not come to, nor what it had done or given up already."""
    keys, others = keys_of(range(20)), keys_of(f"o{n}" for n in range(6))
    async with running(base, "nvme.io_timeout_ms=600000") as daemon:
        ns, other = await daemon.namespace(), await daemon.namespace(tenant="u")
        session = session_of(daemon)
        await other.put(others, pages_of(others, tenant="u"))
        await ns.put(keys, pages_of(keys))
        # The first place is done: four pages, and two that are lost. The other one hangs.
        await other.delete(others[:2])
        daemon.disk.plan(*(Fault(kind=FaultKind.HANG, nth=n) for n in range(5, 50)))
        flushing = asyncio.create_task(daemon.node.flush(session))
        await until(lambda: daemon.disk.hanging)
        assert daemon.counts(Tier.NVME).sealed == 4
        flushing.cancel()
        await asyncio.wait([flushing])
        assert flushing.cancelled()
        daemon.disk.heal()
        await daemon.settled()
        assert await daemon.node.flush(session) == (24, 2)
        assert await daemon.node.flush(session) == (0, 0), "once"
        assert daemon.counts(Tier.NVME).sealed == 24
    async with running(base) as daemon:
        ns, other = await daemon.namespace(), await daemon.namespace(tenant="u")
        assert (await get_checked(ns, keys)).reasons == [HIT] * 20
        assert (await get_checked(other, others)).reasons == [MISS] * 2 + [HIT] * 4


@pytest.mark.parametrize("with_checkpoint", [False, True])
@on_loop
async def test_a_delete_during_a_bump_that_fails_to_be_saved_holds(
    base: Path, with_checkpoint: bool
) -> None:
    """The namespace goes on as it was; a checkpoint of that moment lists its pages."""
    keys = keys_of(range(6))
    async with running(base, "nvme.checkpoint_s=3600") as daemon:
        ns = await daemon.namespace()
        (await ns.put(keys, pages_of(keys), durable="nvme")).raise_for_refused()
        saving, fails = threading.Event(), threading.Event()

        def save(_: object) -> None:
            saving.set()
            assert fails.wait(20)
            raise DirectoryError("no room", remedy="make some")

        with mock.patch.object(daemon.node.directory, "save_namespaces", save):
            bump = asyncio.create_task(daemon.kv.bump_namespace(opaque(), tenant="t"))
            await until(saving.is_set)
            await ns.delete(keys[:2])
            if with_checkpoint:
                await daemon.node.nvme.durability.checkpoint()
            fails.set()
            with pytest.raises(DirectoryError, match="no room"):
                await bump
        await ns.delete(keys[2:3])
        assert (await get_checked(ns, keys)).reasons == [MISS] * 3 + [HIT] * 3
    async with running(base) as daemon:
        ns = await daemon.namespace()
        assert (await get_checked(ns, keys)).reasons == [MISS] * 3 + [HIT] * 3


@on_loop
async def test_the_loop_never_asks_a_device_what_its_files_take(base: Path) -> None:
    """One that hangs would hold up every call. What it said last is told."""
    keys, loop_thread, asked = keys_of(range(4)), threading.get_ident(), []
    ask = NvmeDevice.disk_bytes

    def spying(device: NvmeDevice) -> int:
        asked.append(threading.get_ident())
        return ask(device)

    with mock.patch.object(NvmeDevice, "disk_bytes", spying):
        async with running(base) as daemon:
            ns = await daemon.namespace()
            await ns.put(keys, pages_of(keys), durable="nvme")
            (told,) = (await daemon.kv.status()).devices
            (device,) = daemon.disk.devices
            taken = daemon.metric("kvtier_nvme_disk_bytes", path=str(base / "disk"))
            assert told.disk_bytes == taken == ask(device) > daemon.disk.segment_bytes
    assert asked
    assert loop_thread not in asked
