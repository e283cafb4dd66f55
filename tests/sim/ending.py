"""How a boot ends when it may: in good order, or with every book looked at."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

from kvtier.core.page import Tier
from kvtier.errors import DirectoryError
from tests.sim.boot import Boot
from tests.sim.oracle import Broken
from tests.sim.sim_nvme import Chances

__all__ = ["settle", "stop"]

_EVENTS_MAX = 20_000
Tasks = Iterable[asyncio.Task[Any]]


async def stop(boot: Boot, tasks: Tasks) -> None:
    """As NvmeService.stop: copies down what it can, syncs and checkpoints."""
    _calm(boot)
    for task in tasks:
        task.cancel()
    stopping = asyncio.get_running_loop().create_task(_stop(boot))
    await _drive(boot, stopping)


async def _stop(boot: Boot) -> None:
    nvme, scheduler = boot.nvme, boot.scheduler
    assert nvme is not None
    await nvme.tiering.flush_all(float("inf"))
    while nvme.tiering.under_way:
        await scheduler.pause()
    await nvme.tiering.close()
    await nvme.lower.sync(lambda: None)
    with contextlib.suppress(DirectoryError):  # then the journals are there
        await nvme.durability.checkpoint()
    await nvme.durability.close()


async def settle(boot: Boot, scripts: list[asyncio.Task[Any]], others: Tasks) -> None:
    """Ends every client and lets everything end by itself; then nothing may be held but what jobs
    hold that nobody waits for any more, and when those have ended nothing at all."""
    _calm(boot)
    for script in scripts:
        script.cancel()
    await _drain(boot)
    waiting = [task for task in (*scripts, *others) if not task.done()]
    _demand(boot, not waiting, f"{waiting} never end")
    for task in (*scripts, *others):
        if not task.cancelled():
            task.result()
    store = boot.store
    store.pins.expire(float("inf"))
    while store.sweep(100):
        pass
    if boot.nvme is not None:
        while any(health.lost for health in boot.nvme.lower.health):
            boot.nvme.lower.sweep(100)
    stranded = len(boot.nvme.lower.jobs) if boot.nvme is not None else 0
    _look(boot, stranded)
    while boot.scheduler.fire_one():
        await boot.scheduler.quiesce()
    _look(boot, 0)
    if boot.nvme is not None:
        mover = boot.nvme.mover
        _demand(boot, mover.bounced_bytes == 0, f"{mover.bounced_bytes} bounced bytes are left")
        _demand(boot, not store._moves._sources, "a movement never ended")
    only = asyncio.current_task()
    left = [task for task in asyncio.all_tasks() if task is not only]
    _demand(boot, not left, f"{left} were left behind")


def _look(boot: Boot, stranded: int) -> None:
    boot.store.survey.check()
    boot.listing.check(boot.store)
    for tier, counts in boot.store.status().items():
        of = f"of {tier.name} with {stranded} jobs stranded"
        _demand(boot, counts.pinned <= stranded, f"{counts.pinned} pages still pinned {of}")
        _demand(boot, counts.filling == 0, f"{counts.filling} slots still being filled {of}")
        _demand(boot, counts.retiring <= stranded, f"{counts.retiring} slots never drained {of}")
        cap = counts.capacity_bytes // 20
        if not stranded:
            held = counts.quarantined_bytes
            _demand(boot, held <= cap, f"{tier.name}: {held} bytes of quarantine, over its cap")
    setting = boot.machine.setting
    if boot.nvme is not None and setting.is_roomy and not setting.faults:
        evicted = boot.oracle.counts.evicted_nvme
        _demand(boot, evicted == 0, f"{evicted} pages gave way on a {Tier.NVME.name} with room")


def _demand(boot: Boot, is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise Broken(f"seed {boot.oracle.seed}: {otherwise}")


def _calm(boot: Boot) -> None:
    """Nothing more goes wrong by itself."""
    if boot.nvme is not None:
        boot.nvme.lower.chances = Chances()
        boot.nvme.files.failing = 0.0
        boot.machine.disk.refuses_names = False


async def _drain(boot: Boot) -> None:
    """Everything happens but what nobody waits for."""
    scheduler = boot.scheduler
    for _ in range(_EVENTS_MAX):
        await scheduler.quiesce()
        jobs = boot.nvme.lower.jobs if boot.nvme is not None else []
        waited = [job for job in jobs if job.is_waited_for]
        if scheduler.has_prompt:
            scheduler.fire_prompt()
        elif waited:
            scheduler.fire(waited[0].event)
        else:
            return
    raise Broken(f"seed {boot.oracle.seed}: events without end")


async def _drive(boot: Boot, task: asyncio.Task[None]) -> None:
    """Until `task` has ended."""
    for _ in range(_EVENTS_MAX):
        await boot.scheduler.quiesce()
        if task.done():
            task.result()
            return
        _demand(boot, boot.scheduler.fire_one(), "a stop that never ends")
    raise Broken(f"seed {boot.oracle.seed}: a stop without end")
