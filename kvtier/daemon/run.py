"""The life of the daemon process: start, self-test, READY, serve, drain, end.

`run` returns the exit code. A start that fails raises the KvtierError that says why. SIGTERM and
SIGINT drain; a second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from kvtier._version import __version__
from kvtier.config import PAGE_BYTES_PER_INDEX_ENTRY, CodecName, Switch, process_environment
from kvtier.config.docs import effective_table
from kvtier.config.kinds import parse_listen
from kvtier.config.load import CRASH_VARIABLE, DEFAULT_SOURCE, Effective
from kvtier.core.generations import Generations
from kvtier.core.page import Tier
from kvtier.core.policy import POLICIES
from kvtier.core.slabs import SlabAllocator
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from kvtier.daemon.forecasts import ForecastFile, host_policy
from kvtier.daemon.local_plane import LocalPlane
from kvtier.daemon.local_writes import LocalWrites
from kvtier.daemon.logs import setup_logging
from kvtier.daemon.metrics import Exporter
from kvtier.daemon.node import Node, NodeState, Parts
from kvtier.daemon.nvme_absent import keep_deletes
from kvtier.daemon.nvme_open import prepare
from kvtier.daemon.process import freeze_heap, tune_allocator
from kvtier.daemon.selftest import self_test
from kvtier.daemon.server import Server
from kvtier.daemon.sockets import SOCKET_PATH_BYTES_MAX
from kvtier.daemon.state import LOCAL_SOCKET, new_boot_id, open_directory
from kvtier.errors import DirectoryError, InvalidConfigValue, KvtierError, NotEnoughMemory
from kvtier.packing.fp8 import Fp8Backend, backend
from kvtier.tiers.crash_points import arm_crash_point
from kvtier.tiers.host import SLAB_BYTES, HostArena
from kvtier.tiers.memory import MemoryPolicy, check_address_space, check_memory

__all__ = ["CRASHED", "run"]

log = logging.getLogger(__name__)

#: Exit code after an error that nobody expected (EX_SOFTWARE).
CRASHED = 70

_FIRST_SLAB_S = 60.0
_POLL_S = 0.005
_UPKEEP_S, _STATE_S = 0.1, 1.0
_SWEEP_PAGES, _SWEEP_TURNS = 256, 64
#: After the drain deadline, what is left is cancelled and has this long to notice.
_CANCEL_GRACE_S = 0.5


def run(effective: Effective, *, ready_fd: int | None = None, discard_cache: bool = False) -> int:
    """Serves until told to stop. `ready_fd` gets "READY=1\\n" when calls are served, then is shut.

    `discard_cache` gives up everything that earlier boots left, readable or not.

    Raises KvtierError when the daemon cannot start.
    """
    daemon = effective.config.daemon
    setup_logging(daemon.log_level, daemon.log_format)
    log.info("daemon.starting", extra={"version": __version__, "pid": os.getpid()})
    for name, entry in effective_table(effective).items():
        if entry["source"] != DEFAULT_SOURCE:
            log.info("config.value", extra={"key": name, **entry})
    if crash := process_environment().get(CRASH_VARIABLE, ""):
        _arm(crash)
    try:
        asyncio.run(_serve(effective, ready_fd, discard_cache=discard_cache))
    except KvtierError as error:
        log.error("daemon.start_failed", extra={"error": str(error), "kind": type(error).__name__})
        raise
    except Exception:
        log.exception("daemon.crashed")
        return CRASHED
    log.info("daemon.stopped")
    return 0


def _arm(crash: str) -> None:
    try:
        arm_crash_point(crash)
    except ValueError as error:
        raise InvalidConfigValue(
            f"{CRASH_VARIABLE} = {crash!r}: {error}",
            remedy="It is for tests: unset it to run the daemon.",
        ) from error
    log.warning("daemon.crash_armed", extra={"where": crash})


async def _serve(effective: Effective, ready_fd: int | None, *, discard_cache: bool) -> None:
    with ExitStack() as stack:
        node = _build(effective, stack, discard_cache=discard_cache)
        server = Server(node, effective)
        loops: list[asyncio.Task[None]] = []
        try:
            _export_metrics(node, effective, stack)
            await server.start()
            await _start_nvme(node)
            await _first_slab(node)
            await self_test(node)
            _drain_on_signals(node)
            freeze_heap()
            _start_local(node, effective)
            node.begin_serving()
            await server.set_serving(True)
            loops += _begin_loops(node)
            _tell_ready(node, ready_fd)
            await node.drain.asked.wait()
            await _drain(node, server, loops)
        finally:
            await _end(loops)
            await server.stop(_CANCEL_GRACE_S)
            await node.registry.settle()
            node.sessions.end_all()
            if node.nvme is not None:
                await node.nvme.close()
            elif node.durability is not None:
                await node.durability.close()


def _build(effective: Effective, stack: ExitStack, *, discard_cache: bool) -> Node:
    """Everything but the network, closed with `stack`."""
    config = effective.config
    not_tuned = tune_allocator()
    directory = stack.enter_context(
        open_directory(config.daemon.directory, discard_cache=discard_cache)
    )
    nvme = None
    if config.nvme.paths:
        nvme = prepare(config.nvme, directory.path, discard_cache=discard_cache)
        stack.callback(nvme.tier.close)
    unusable: dict[Path, str] = {}
    if nvme is not None and not nvme.tier.devices:
        unusable, nvme = nvme.unusable, None
    grant = check_memory(config.host.bytes, policy=MemoryPolicy(unit_bytes=SLAB_BYTES))
    index_pages = grant.granted_bytes // PAGE_BYTES_PER_INDEX_ENTRY
    index_pages += nvme.pages_max if nvme is not None else 0
    check_address_space(grant.granted_bytes, index_pages=index_pages)
    arena = HostArena(grant.granted_bytes)
    stack.callback(arena.close)
    boot_id = new_boot_id()
    pages_max = arena.capacity_bytes // PAGE_BYTES_PER_INDEX_ENTRY
    tiers = {Tier.HOST: SlabAllocator(slab_bytes=arena.slab_bytes, numbers=range(arena.slab_count))}
    tier_pages_max = {Tier.HOST: pages_max}
    if nvme is not None:
        tiers[Tier.NVME] = nvme.allocator()
        tier_pages_max[Tier.NVME] = nvme.pages_max
    local = None
    if config.local.plane is Switch.ON:
        local = LocalPlane(
            boot_id,
            pages_max=sum(tier_pages_max.values()),
            namespaces_max=config.limits.namespaces_max,
        )
        stack.callback(local.close)
    store = Store(
        StoreConfig(
            boot_id=boot_id,
            pages_max=sum(tier_pages_max.values()),
            tier_pages_max=tier_pages_max,
            seed=secrets.randbits(63),
            events_max=config.limits.watch_events_max,
        ),
        tiers=tiers,
        generations=Generations(directory.generation_bound, directory.journal_generations),
        make_policy={
            Tier.HOST: host_policy(config.host.policy),
            Tier.NVME: POLICIES[config.nvme.policy.value],
        },
        listing=local.listing if local is not None else None,
    )
    node = Node(
        Parts(
            config=config,
            boot_id=boot_id,
            directory=directory,
            arena=arena,
            store=store,
            nvme=nvme,
            local=local,
            forecasts=ForecastFile(directory.path, store, config.host.policy),
        )
    )
    reduced = f"host tier: {grant.reason}" if grant.is_reduced else ""
    for what in (not_tuned, node.forecasts.load(), reduced):
        if what:
            node.warn(what)
    _warn_of_nvme(node, unusable)
    arena.start_populating(lambda slab: store.room.grant(Tier.HOST, slab))
    return node


def _warn_of_nvme(node: Node, unusable: dict[Path, str]) -> None:
    """`unusable`: why each path is not, when none is and the tier is left out."""
    for path, reason in unusable.items():
        node.warn(f"nvme: {path} is not used until the next start: {reason}")
    is_packed = node.config.nvme.codec is CodecName.FP8 and node.nvme is not None
    if is_packed and backend() is Fp8Backend.TORCH:
        node.warn("no numba, so torch packs fp8, ten times slower: pip install 'kvtier[fast]'")


async def _start_nvme(node: Node) -> None:
    """The pages of earlier boots, or what they need in a boot without the tier."""
    config = node.config.nvme
    if node.nvme is not None:
        await node.nvme.start()
    else:
        node.durability = await keep_deletes(node.directory, node.store, node.registry, config)
    if node.durability is None:
        return
    node.registry.on_ended = node.durability.know
    if node.nvme is None:
        why = "no path of nvme.paths can be used" if config.paths else "nvme.paths is empty"
        node.warn(f"{why}, and there are pages on NVMe: they are not served")


def _start_local(node: Node, effective: Effective) -> None:
    """After the self-test, so that nobody reads pages of a daemon that does not work."""
    if node.local is None:
        return

    def refuse(reason: str, remedy: str) -> KvtierError:
        return effective.invalid("local.plane", reason, remedy=remedy)

    path = _local_socket(node)
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        node.warn(f"local plane: {path} is longer than the path of a socket may be")
        return
    writes = LocalWrites(
        node.store,
        node.arena,
        grant_s=node.config.local.grant_ms / 1000,
        subject_of=node.registry.subject_of,
        is_serving=lambda: node.state is NodeState.READY,
        on_put=node.put_reports.add,
        on_answered=partial(node.put_reports.wake, asyncio.get_running_loop()),
    )
    node.local_socket = node.local.start(
        path,
        node.arena,
        node.store,
        node.metrics,
        writes,
        connections_max=2 * node.config.limits.sessions_max,  # to read, and to write
        refuse=refuse,
    )


def _local_socket(node: Node) -> Path:
    """Beside the first unix socket, so that it lies where sockets do; else in the directory."""
    for text in node.config.daemon.listen:
        if (path := parse_listen(text).path) is not None:
            return path.with_name(path.name + ".local")
    return node.directory.path / LOCAL_SOCKET


async def _first_slab(node: Node) -> None:
    """Returns when the arena can take pages. Raises NotEnoughMemory."""
    deadline = asyncio.get_running_loop().time() + _FIRST_SLAB_S
    while not node.store.status()[Tier.HOST].granted_bytes:
        if node.arena.degraded or asyncio.get_running_loop().time() > deadline:
            reason = node.arena.degraded or f"nothing after {_FIRST_SLAB_S:g} s"
            raise NotEnoughMemory(
                f"the host tier got no memory: {reason}",
                remedy="Lower host.bytes, or give the daemon more memory.",
            )
        await asyncio.sleep(_POLL_S)


def _export_metrics(node: Node, effective: Effective, stack: ExitStack) -> None:
    text = effective.config.daemon.metrics_listen
    if not text:
        return
    host, _, port = text.rpartition(":")
    try:
        exporter = Exporter(node.metrics.registry, host.strip("[]"), int(port))
    except OSError as error:
        raise effective.invalid(
            "daemon.metrics_listen",
            f"cannot be bound: {error.strerror}",
            remedy="Stop what listens there, or name another port (0 takes a free one).",
        ) from error
    stack.callback(exporter.close)
    node.metrics_url = f"http://{host}:{exporter.port}/metrics"


def _drain_on_signals(node: Node) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if node.drain.asked.is_set():
            os._exit(1)
        node.request_drain(node.config.daemon.drain_deadline_s)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def _tell_ready(node: Node, ready_fd: int | None) -> None:
    log.info(
        "daemon.ready",
        extra={
            "listen": ",".join(node.listening),
            "metrics": node.metrics_url,
            "boot_id": node.boot_id,
            "host_bytes": node.arena.capacity_bytes,
            "seconds": round(node.uptime_s(), 3),
        },
    )
    if ready_fd is not None:
        # Who waited for it may have given up; the daemon is ready all the same.
        with suppress(BrokenPipeError):
            os.write(ready_fd, b"READY=1\n")
        os.close(ready_fd)


async def _drain(node: Node, server: Server, loops: Sequence[asyncio.Task[None]]) -> None:
    """New calls are refused from now on; what is under way may end until the deadline."""
    loop = asyncio.get_running_loop()
    left_s = max(0.0, node.drain.deadline - loop.time())
    log.info("daemon.draining", extra={"seconds": round(left_s, 3), "pages": node.host_pages()})
    await server.set_serving(False)
    await node.admission.wait_idle(node.drain.deadline)
    await _end(loops)
    await _guarded("forecasts", node.forecasts.save())
    lost = node.host_pages()
    if node.nvme is not None:
        lost = await node.nvme.stop(node.drain.deadline)
    node.drain.pages_lost = lost
    node.drain.done.set()
    log.info("daemon.drained", extra={"pages_lost": lost})


def _begin_loops(node: Node) -> list[asyncio.Task[None]]:
    """What the daemon does by itself."""
    loop = asyncio.get_running_loop()

    async def sweep() -> None:
        for _ in range(_SWEEP_TURNS):
            if not node.store.sweep(_SWEEP_PAGES):
                return
            await asyncio.sleep(0)

    async def expire() -> None:
        node.store.forecasts.tell_time(loop.time())
        node.sessions.reap()
        node.store.pins.expire(loop.time())

    loops: list[tuple[str, Callable[[], Awaitable[object]], float]] = [
        ("expire", expire, _UPKEEP_S),
        ("sweep", sweep, _UPKEEP_S),
        ("state files", node.confirm_state, _STATE_S),
    ]
    if node.forecasts.is_on:
        loops.append(("forecasts", node.forecasts.save, node.config.nvme.checkpoint_s))
    if node.nvme is not None:
        loops += node.nvme.loops()
    tasks = [asyncio.create_task(_repeat(*each)) for each in loops]
    scrub = node.config.scrub
    scrubbing = node.scrubber.scrub_forever(
        scrub.interval_s, bytes_per_second=scrub.bytes_per_second
    )
    return [*tasks, asyncio.create_task(_guarded("scrub", scrubbing))]


async def _end(loops: Sequence[asyncio.Task[None]]) -> None:
    """They use the tiers (a scrub holds pages and a child process), so they go before those do."""
    for task in loops:
        task.cancel()
    if loops:
        await asyncio.wait(loops)


async def _repeat(name: str, work: Callable[[], Awaitable[object]], every_s: float) -> None:
    me = asyncio.current_task()
    # A task group whose tasks fail while it is cancelled tells of them, and not of that.
    while me is None or not me.cancelling():
        await asyncio.sleep(every_s)
        await _guarded(name, work())


async def _guarded(name: str, work: Awaitable[object]) -> None:
    try:
        await work
    except DirectoryError as error:
        log.error("nvme.journal_failed", extra={"error": str(error)})
    except Exception:
        log.exception("task.crashed", extra={"task": name})
