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
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

from kvtier._version import __version__
from kvtier.config import PAGE_BYTES_PER_INDEX_ENTRY
from kvtier.config_docs import effective_table
from kvtier.config_load import DEFAULT_SOURCE, Effective
from kvtier.core.generations import Generations
from kvtier.core.page import Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.store import Store, StoreConfig
from kvtier.daemon.logs import setup_logging
from kvtier.daemon.metrics import Exporter
from kvtier.daemon.node import Node, Parts
from kvtier.daemon.process import freeze_heap, tune_allocator
from kvtier.daemon.selftest import self_test
from kvtier.daemon.server import Server
from kvtier.daemon.state import new_boot_id, open_directory
from kvtier.errors import KvtierError, NotEnoughMemory
from kvtier.tiers.host import SLAB_BYTES, HostArena
from kvtier.tiers.memory import MemoryPolicy, check_memory

__all__ = ["CRASHED", "run"]

log = logging.getLogger(__name__)

#: Exit code after an error that nobody expected (EX_SOFTWARE).
CRASHED = 70

_FIRST_SLAB_S = 60.0
_POLL_S = 0.005
_UPKEEP_S = 0.1
_SWEEP_PAGES = 256
_SWEEP_TURNS = 64
#: After the drain deadline, what is left is cancelled and has this long to notice.
_CANCEL_GRACE_S = 0.5


def run(effective: Effective, *, ready_fd: int | None = None) -> int:
    """Serves until told to stop. `ready_fd` gets "READY=1\\n" when calls are served, then is shut.

    Raises KvtierError when the daemon cannot start.
    """
    daemon = effective.config.daemon
    setup_logging(daemon.log_level, daemon.log_format)
    log.info("daemon.starting", extra={"version": __version__, "pid": os.getpid()})
    for name, entry in effective_table(effective).items():
        if entry["source"] != DEFAULT_SOURCE:
            log.info("config.value", extra={"key": name, **entry})
    try:
        asyncio.run(_serve(effective, ready_fd))
    except KvtierError as error:
        log.error("daemon.start_failed", extra={"error": str(error), "kind": type(error).__name__})
        raise
    except Exception:
        log.exception("daemon.crashed")
        return CRASHED
    log.info("daemon.stopped")
    return 0


async def _serve(effective: Effective, ready_fd: int | None) -> None:
    with ExitStack() as stack:
        node = _build(effective, stack)
        server = Server(node, effective)
        try:
            _export_metrics(node, effective, stack)
            await server.start()
            await _first_slab(node)
            await self_test(node)
            _drain_on_signals(node)
            freeze_heap()
            node.begin_serving()
            await server.set_serving(True)
            _tell_ready(node, ready_fd)
            upkeep = asyncio.create_task(_upkeep(node))
            await node.drain.asked.wait()
            await _drain(node, server)
            upkeep.cancel()
        finally:
            await server.stop(_CANCEL_GRACE_S)
            await node.registry.settle()
            node.sessions.end_all()


def _build(effective: Effective, stack: ExitStack) -> Node:
    """Everything but the network, closed with `stack`."""
    config = effective.config
    not_tuned = tune_allocator()
    directory = stack.enter_context(open_directory(config.daemon.directory))
    grant = check_memory(config.host.bytes, policy=MemoryPolicy(unit_bytes=SLAB_BYTES))
    arena = HostArena(grant.granted_bytes)
    stack.callback(arena.close)
    boot_id = new_boot_id()
    store = Store(
        StoreConfig(
            boot_id=boot_id,
            # Of what was granted, which can be far less than configured.
            pages_max=arena.capacity_bytes // PAGE_BYTES_PER_INDEX_ENTRY,
            seed=secrets.randbits(63),
            events_max=config.limits.watch_events_max,
        ),
        tiers={
            Tier.HOST: SlabAllocator(
                capacity_bytes=arena.capacity_bytes, slab_bytes=arena.slab_bytes
            )
        },
        generations=Generations(directory.generation_bound, directory.journal_generations),
    )
    node = Node(
        Parts(config=config, boot_id=boot_id, directory=directory, arena=arena, store=store)
    )
    if not_tuned:
        node.warn(not_tuned)
    if grant.is_reduced:
        node.warn(f"host tier: {grant.reason}")
    arena.start_populating(lambda slab: store.grant_slab(Tier.HOST, slab))
    return node


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


async def _drain(node: Node, server: Server) -> None:
    """New calls are refused from now on; what is under way may end until the deadline."""
    loop = asyncio.get_running_loop()
    left_s = max(0.0, node.drain.deadline - loop.time())
    log.info("daemon.draining", extra={"seconds": round(left_s, 3), "pages": node.host_pages()})
    await server.set_serving(False)
    await node.admission.wait_idle(node.drain.deadline)


async def _upkeep(node: Node) -> None:
    """What time brings: sessions and leases that run out, pages of ended namespaces."""
    loop = asyncio.get_running_loop()

    async def sweep() -> None:
        for _ in range(_SWEEP_TURNS):
            if not node.store.sweep(_SWEEP_PAGES):
                return
            await asyncio.sleep(0)

    async def expire() -> None:
        node.sessions.reap()
        node.store.pins.expire(loop.time())

    while True:
        await _guarded("expire", expire)
        await _guarded("sweep", sweep)
        await asyncio.sleep(_UPKEEP_S)


async def _guarded(name: str, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except Exception:
        log.exception("task.crashed", extra={"task": name})
