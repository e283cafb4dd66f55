"""Watching a family through the client: what is there, then every change."""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing

import numpy as np
import pytest

import kvtier
from kvtier.client import ResidencyKind
from kvtier.core.page import Tier
from tests.client.local_rig import opaque
from tests.forks import daemon_of_its_own

PAGE = 4096


@pytest.fixture(scope="module")
def daemon(forker):
    with daemon_of_its_own(forker, "host.bytes=16MiB", "limits.watch_events_max=16") as running:
        yield running


def test_a_snapshot_and_then_the_changes(daemon):
    async def run():
        async with kvtier.aio.connect(daemon.url, deadline=5, plane="grpc") as kv:
            ns = await kv.namespace(opaque(PAGE), tenant="a")
            keys = [bytes([number]) * 32 for number in range(3)]
            pages = np.zeros((3, PAGE), np.uint8)
            await ns.put(keys[:2], pages[:2])
            async with aclosing(kv.watch(ns.fingerprint)) as events:
                first = await anext(events)
                assert (first.kind, first.tier, first.shard) == (
                    ResidencyKind.SNAPSHOT, Tier.HOST, 0,
                )  # fmt: skip
                assert {first.keys[:32], first.keys[32:]} == set(keys[:2])
                assert (await anext(events)).kind is ResidencyKind.SNAPSHOT_END
                await ns.put(keys[2:], pages[2:])
                await ns.delete(keys[:1])
                await ns.bump()
                changes = [await anext(events) for _ in range(3)]
                assert [(change.kind, change.keys) for change in changes] == [
                    (ResidencyKind.STORED, keys[2]),
                    (ResidencyKind.REMOVED, keys[0]),
                    (ResidencyKind.BUMPED, b""),
                ]
                assert {change.epoch for change in changes} == {first.epoch}

    asyncio.run(run())


def test_one_that_falls_behind_and_one_without_a_daemon(daemon):
    async def run():
        async with kvtier.aio.connect(daemon.url, deadline=5, plane="grpc") as kv:
            ns = await kv.namespace(opaque(PAGE), tenant="b")
            keys = [bytes([number]) * 32 for number in range(40)]
            await ns.put(keys, np.zeros((40, PAGE), np.uint8))
            with pytest.raises(kvtier.Busy):
                async with aclosing(kv.watch(ns.fingerprint)) as events:
                    while (await anext(events)).kind is not ResidencyKind.SNAPSHOT_END:
                        pass
                    await ns.delete(keys)
                    async for _ in events:
                        pass
        async with kvtier.aio.connect("unix:///nowhere/k.sock", plane="grpc") as kv:
            with pytest.raises(kvtier.DaemonUnavailable):
                async for _ in kv.watch(bytes(32), deadline=1):
                    pass

    asyncio.run(run())


def test_a_stopped_daemon_is_an_error_after_the_silence_that_is_allowed(forker):
    """A connection shows it much later; a quiet daemon that runs is none."""

    async def run(daemon):
        async with kvtier.aio.connect(daemon.url, deadline=5, plane="grpc") as kv:
            ns = await kv.namespace(opaque(PAGE))
            async with aclosing(kv.watch(ns.fingerprint, deadline=5, silence=1.0)) as events:
                assert (await anext(events)).kind is ResidencyKind.SNAPSHOT_END
                await ns.put([bytes(32)], np.zeros((1, PAGE), np.uint8))
                assert (await anext(events)).kind is ResidencyKind.STORED
                daemon.signal(signal.SIGSTOP)
                async with asyncio.timeout(15):
                    with pytest.raises(kvtier.DeadlineExceeded, match="reported nothing"):
                        await anext(events)

    with daemon_of_its_own(forker, "host.bytes=16MiB") as daemon:
        try:
            asyncio.run(run(daemon))
        finally:
            daemon.signal(signal.SIGCONT)
