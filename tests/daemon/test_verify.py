"""Verify, over a real connection: what a caller is told, and that nobody else is held up."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from raw_calls import RawClient, fails, key_of, payload_of, put_stream, settled
from scrub_rig import FAST, is_gone, rig

from kvtier.core.page import Tier
from kvtier.daemon import services_verify
from kvtier.errors import DeadlineExceeded
from kvtier.transfer.rpc import ADMIN
from kvtier.v1 import admin_pb2

HOST = 2
LEAST = 64 << 10


def verify(client: RawClient, rate: int = 0, tier: int = HOST):
    request = admin_pb2.VerifyRequest(tier=tier, bytes_per_second=rate)
    return client.stream("Verify", request, service=ADMIN)


def fill(client: RawClient, count: int):
    opened = client.open()
    client.put_messages(put_stream(opened, [(key_of(i), payload_of(i)) for i in range(count)]))
    return opened


def scrub_process(daemon) -> int:
    """The pid of the daemon's scrub process, once it is there."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes()
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
                continue
            if b"scrub_worker" in words and parent == str(daemon.pid):
                return int(entry.name)
        time.sleep(0.01)
    raise AssertionError("no scrub process")


def test_a_slow_verify_one_at_a_time_and_others_served_meanwhile(daemon, client):
    opened = fill(client, 40)
    with RawClient(daemon.url) as other:
        slow = verify(client, LEAST)  # a page a second
        first = next(slow)
        assert 0 < first.pages_done < first.pages_total == 40
        fails(lambda: list(verify(other)), grpc.StatusCode.RESOURCE_EXHAUSTED, "Busy", "host")
        assert client.get(opened, [key_of(i) for i in range(40)]).codes == [1] * 40
        slow.cancel()
        settled(other)
        last = admitted(other)
        assert last.pages_done == 40


def admitted(client: RawClient) -> admin_pb2.VerifyProgress:
    """The end of a Verify, tried until an earlier one has ended: a cancellation takes its time."""
    deadline = time.monotonic() + 5
    while True:
        try:
            return list(verify(client))[-1]
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
        assert time.monotonic() < deadline


def test_what_cannot_be_asked_for_and_an_empty_tier(client):
    status = grpc.StatusCode.INVALID_ARGUMENT
    for tier in (0, 1, 3, 4, 77):
        fails(lambda tier=tier: list(verify(client, 0, tier)), status, "LimitExceeded", "tier")
    fails(lambda: list(verify(client, LEAST - 1)), status, "LimitExceeded", "bytes_per_second")
    (only,) = verify(client)
    assert (only.pages_done, only.pages_total, only.bytes_done, only.pages_corrupt) == (0, 0, 0, 0)


def test_a_process_that_dies_is_said_and_the_daemon_lives_on(daemon, client):
    opened = fill(client, 20)
    stream = verify(client, LEAST)
    next(stream)
    os.kill(scrub_process(daemon), signal.SIGKILL)
    fails(lambda: list(stream), grpc.StatusCode.UNAVAILABLE, "DaemonUnavailable", "signal 9")
    assert settled(client).pages_sealed == 20
    assert client.get(opened, [key_of(1)]).codes == [1]
    assert list(verify(client))[-1].pages_done == 20
    assert daemon.log.count("event=scrub.failed") == 1


def test_a_drain_ends_it(make_daemon):
    daemon = make_daemon().start()
    with RawClient(daemon.url) as raw:
        fill(raw, 20)
        stream = verify(raw, LEAST)
        next(stream)
        pid = scrub_process(daemon)
        daemon.signal(signal.SIGTERM)
        fails(lambda: list(stream), grpc.StatusCode.UNAVAILABLE, "DaemonUnavailable", "draining")
    assert daemon.wait() == 0
    assert not Path(f"/proc/{pid}").exists()


def test_a_daemon_that_is_killed_takes_its_process_along(make_daemon):
    daemon = make_daemon().start()
    with RawClient(daemon.url) as raw:
        fill(raw, 20)
        stream = verify(raw, LEAST)
        next(stream)
        pid = scrub_process(daemon)
        os.kill(daemon.pid, signal.SIGKILL)  # it alone, not its group
        daemon.wait()
        deadline = time.monotonic() + 5
        while not is_gone(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_reader_that_stands_still_is_cut_off():
    """In this process: progress is so little that a connection holds all of it."""

    class Reader:
        async def write(self, message) -> None:
            await asyncio.sleep(60)

    with rig(1) as made:
        for n in range(20):
            made.put(n)
        scrubber = made.scrubber()
        node = SimpleNamespace(
            scrubber=scrubber,
            config=SimpleNamespace(limits=SimpleNamespace(get_idle_ms=50)),
            refuse_unless_serving=lambda: None,
        )
        request = admin_pb2.VerifyRequest(tier=HOST, bytes_per_second=FAST)
        with pytest.raises(DeadlineExceeded, match="get_idle_ms"):
            asyncio.run(services_verify.verify(node, request, Reader()))
        assert scrubber.running is None
        assert scrubber.last[Tier.HOST].counts.pages_done == 4
