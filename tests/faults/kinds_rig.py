"""A whole daemon in this process, on real files, whose NVMe device fails as a test wants.

`running(...)` is `kvtier serve` without a process of its own: the same parts, the same start, a
real socket, the asyncio client. Only its NVMe tier is wrapped, in a FaultyDisk. All of it lives in
the event loop of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import inspect
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import kvtier
from kvtier.config.load import load
from kvtier.core.handles import Reading
from kvtier.core.page import GetCode, PageRef, Tier
from kvtier.daemon import run
from kvtier.daemon.node import Node, NodeState
from kvtier.testing.cells import Foreign, check_page, make_page
from kvtier.testing.faulty_tier import Fault, FaultKind, FaultyTier
from kvtier.tiers.base import Buffer, TierOperation

READ, WRITE = TierOperation.READ, TierOperation.WRITE
PAGE = 16 << 10
#: The client waits longer for a call than anything here takes.
DEADLINE_S = 20.0


class FaultyDisk:
    """An NvmeTier of which single slots, or all calls, fail as planned; what has no plan works.

    Thread rule: as NvmeTier; plans are made before the calls that they are for.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        #: How long it takes to make a segment.
        self.create_s = 0.0
        self._of_slot: dict[int, FaultyTier] = {}
        self._of_all = FaultyTier(inner, seed=0)
        self._plans: list[FaultyTier] = [self._of_all]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def plan(
        self, *faults: Fault, slots: Sequence[int] | None = None, seed: int = 0
    ) -> list[FaultyTier]:
        """The faults of these slots, each with counts of its own, or of all calls."""
        made = [FaultyTier(self.inner, faults, seed=seed) for _ in slots or [0]]
        self._plans += made
        if slots is None:
            self._of_all = made[0]
        else:
            self._of_slot |= dict(zip(slots, made, strict=True))
        return made

    def heal(self) -> None:
        """From now on everything works; what hangs goes on."""
        self._of_slot, self._of_all = {}, FaultyTier(self.inner, seed=0)
        self._plans.append(self._of_all)
        self.release()

    def release(self) -> None:
        for made in self._plans:
            made.release()

    @property
    def hanging(self) -> int:
        return sum(made.hanging for made in self._plans)

    def calls(self, operation: TierOperation) -> int:
        """How many reads or writes there were since the start, failed ones too."""
        return sum(made.calls[operation] for made in self._plans)

    def count(self, kind: FaultKind) -> int:
        return sum(made.count(kind) for made in self._plans)

    def create_segment(self, slab: int) -> None:
        time.sleep(self.create_s)
        self.inner.create_segment(slab)

    def write(self, slot: int, parts: Sequence[Buffer], offset: int = 0) -> None:
        self._of_slot.get(slot, self._of_all).write(slot, parts, offset)

    def read(self, slot: int, offset: int, into: Buffer) -> None:
        self._of_slot.get(slot, self._of_all).read(slot, offset, into)

    def close(self) -> None:
        self.release()
        self.inner.close()


def always(kind: FaultKind, operation: TierOperation = READ, **more: Any) -> Fault:
    return Fault(kind=kind, operation=operation, probability=1.0, **more)


@dataclass
class Running:
    """A READY daemon and a client of it. `node` is the inside, for counting and for slots."""

    node: Node
    disk: FaultyDisk
    kv: kvtier.aio.AsyncConnection
    base: Path
    url: str
    stops: bool = False  # True: it ends as by SIGTERM; else as by SIGKILL, saving nothing

    @property
    def store(self):
        return self.node.store

    async def namespace(self, page_bytes: int = PAGE, **options: Any):
        tenant = options.pop("tenant", "t")
        return await self.kv.namespace(opaque(page_bytes, **options), tenant=tenant)

    def copies(self, ns: Any, key: bytes) -> dict[Tier, PageRef]:
        """Where the page is."""
        number = self.number(ns)
        (found,) = self.store.acquire(number, 0, rows([key]), is_use=False)
        refs = {}
        while isinstance(found, Reading):
            refs[found.ref.tier] = found.ref
            found.release()
            found = self.store.acquire_next(found.ref, number, 0, key)
        return refs

    def slots(self, ns: Any, keys: Sequence[bytes]) -> list[int]:
        """Of the copies on NVMe."""
        return [self.copies(ns, key)[Tier.NVME].slot for key in keys]

    def number(self, ns: Any) -> int:
        (number,) = (
            family.number
            for family in self.node.registry.families()
            if family.identity.fingerprint == ns.fingerprint
        )
        return number

    def counts(self, tier: Tier):
        return self.store.status()[tier]

    def metric(self, name: str, **labels: str) -> float:
        """The value of a sample as Prometheus sees it; 0 where there is none."""
        return self.node.metrics.registry.get_sample_value(name, labels) or 0.0

    async def settled(self) -> None:
        """Soon there is no lease, no half-made copy, nothing stuck; all books agree."""
        nothing = (0, 0, 0, 0)

        def is_quiet() -> bool:
            return all(
                (counts.filling, counts.pinned, counts.retiring, self.store.pins.count()) == nothing
                for counts in self.store.status().values()
            )

        await until(is_quiet)
        self.store.survey.check()


@contextmanager
def short_directory() -> Iterator[Path]:
    """A directory with a name short enough for a socket path, mode 0700."""
    path = Path(tempfile.mkdtemp(prefix="kvt-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that is a coroutine; its argument `base` is a directory of its own."""
    parameters = inspect.signature(test).parameters

    @functools.wraps(test)
    def call(**arguments: Any) -> None:
        with short_directory() as base:
            own = {"base": base} if "base" in parameters else {}
            asyncio.run(test(**own, **arguments))

    given = [parameter for name, parameter in parameters.items() if name != "base"]
    call.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    return call


@asynccontextmanager
async def running(base: Path, *settings: str) -> AsyncIterator[Running]:
    """A daemon over `base`; again over the same one is a restart."""
    values = {
        "daemon.directory": str(base / "state"),
        "daemon.listen": f"unix://{base}/run/k.sock",
        "daemon.drain_deadline_s": "5",
        "host.bytes": "4MiB",
        "nvme.paths": str(base / "disk"),
        "nvme.bytes": "32MiB",
        "nvme.clean_percent": "0",
        "nvme.retry_s": "0.05",
    } | dict(setting.split("=", 1) for setting in settings)
    effective = load(environ={}, overrides=[f"{name}={value}" for name, value in values.items()])
    made: dict[str, Any] = {"disk": FaultyDisk(None)}  # without nvme.paths there is none
    preparing = run.prepare

    def prepare(*args: Any, **options: Any) -> Any:
        parts = preparing(*args, **options)
        made["disk"] = FaultyDisk(parts.tier)
        return replace(parts, tier=made["disk"])

    def node_of(parts: Any) -> Node:
        made["node"] = Node(parts)
        return made["node"]

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (run, "prepare", prepare),
            (run, "Node", node_of),
            # Those change the process for good.
            (run, "freeze_heap", lambda: None),
            (run, "tune_allocator", lambda: ""),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        serving = asyncio.create_task(run._serve(effective, None, discard_cache=False))
        await until(
            lambda: serving.done() or ("node" in made and made["node"].state is NodeState.READY),
            within_s=DEADLINE_S,
        )
    if serving.done():
        serving.result()
    node, url = made["node"], values["daemon.listen"]
    try:
        # What these tests watch is the daemon; the local plane has tests of its own.
        async with kvtier.aio.connect(url, deadline=DEADLINE_S, plane="grpc") as kv:
            daemon = Running(node=node, disk=made["disk"], kv=kv, base=base, url=url)
            yield daemon
    finally:
        made["disk"].release()
        if daemon.stops:
            node.request_drain(5.0)
        else:
            serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


def opaque(page_bytes: int = PAGE, **fields: Any) -> kvtier.Layout:
    """Pages of one token without any meaning."""
    segment = kvtier.Segment(
        name="bytes",
        role=kvtier.Role.OPAQUE,
        dtype="uint8",
        layers=1,
        heads=1,
        dim=page_bytes,
        scale_rule=kvtier.ScaleRule.NONE,
    )
    identity = {"model_id": "m", "revision": "r1", "page_tokens": 1, "kv_compute": "uint8"}
    return kvtier.Layout.from_segments([segment], **(identity | fields))


def key_of(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def keys_of(names: Sequence[object]) -> list[bytes]:
    return [key_of(name) for name in names]


def rows(keys: Sequence[bytes]):
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)


def page_of(key: bytes, size: int = PAGE, *, tenant: str = "t", version: int = 1) -> bytes:
    """Bytes that say in every cell whose they are."""
    return make_page(size, namespace=tenant, key=key, version=version)


def pages_of(keys: Sequence[bytes], size: int = PAGE, **more: Any) -> list[bytes]:
    return [page_of(key, size, **more) for key in keys]


def wrong_cells(page: Buffer, key: bytes, *, tenant: str = "t", version: int = 1) -> list[Foreign]:
    return check_page(page, namespace=tenant, key=key, version=version)


def poisoned(count: int, size: int = PAGE):
    """Memory for pages, full of bytes that no page has."""
    return np.full((count, size), 0xA5, np.uint8)


async def get_checked(ns: Any, keys: Sequence[bytes], size: int = PAGE, **more: Any):
    """A get into poisoned memory; every hit holds its own page and nothing else."""
    out = poisoned(len(keys), size)
    got = await ns.get(keys, out=out, **more)
    for i, (item, key) in enumerate(zip(got, keys, strict=True)):
        if item.reason is GetCode.HIT:
            assert wrong_cells(out[i].data, key, tenant=ns.tenant) == [], i
    return got


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Returns as soon as it holds."""
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit, f"not so within {within_s:g} s"
        await asyncio.sleep(0.005)


async def put_on_disk(base: Path, keys: Sequence[bytes], *settings: str, **more: Any) -> None:
    """A daemon that stores these pages durably, and is killed: they are on NVMe alone then."""
    size = more.get("size", PAGE)
    async with running(base, *settings) as daemon:
        ns = await daemon.namespace(size)
        put = await ns.put(keys, pages_of(keys, size), durable="nvme")
        put.raise_for_refused()
