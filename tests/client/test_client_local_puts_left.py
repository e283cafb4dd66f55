"""Puts by shared memory against a real daemon: what is left to gRPC, what happens when the daemon
does not answer or ends, and what it keeps count of.
"""

from __future__ import annotations

import signal
import time
from dataclasses import asdict

import numpy as np
import pytest

import kvtier
from kvtier.client.local_puts import PutCounts
from tests.client.local_puts_rig import metrics, opened, remote, soon
from tests.client.local_rig import NBYTES, attached, pages_of, separate_keys, two_segments
from tests.forks import ForkedDaemon, daemon_of_its_own

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode
METRICS = "daemon.metrics_listen=127.0.0.1:0"
ARENA = 64 << 20


@pytest.fixture(scope="module")
def shared(forker):
    """One daemon for the tests that leave it as it was; each has a tenant of its own."""
    with daemon_of_its_own(forker, f"host.bytes={ARENA}", METRICS) as running:
        yield running


@pytest.fixture
def local(shared, request):
    with opened(shared, tenant=request.node.name[:60]) as pair:
        yield pair


# -- what is left to gRPC -------------------------------------------------------------------------


def test_who_asks_for_grpc_is_no_writer(shared):
    before = metrics(shared)['kvtier_local_clients{role="writer"}']
    with opened(shared, plane="grpc", tenant="far") as (kv, ns):
        keys = ns.keys(range(2))
        ns.put(keys, pages_of(keys, NBYTES)).raise_for_refused()
        assert kv.local.puts == PutCounts()
        assert "grpc" in kv.local.not_writing
        assert metrics(shared)['kvtier_local_clients{role="writer"}'] <= before


def test_durable_and_packed_puts_in_an_arena_of_one_slab(tmp_path, forker):
    """They need the room that was granted ahead, and get it."""
    (tmp_path / "nvme").mkdir(mode=0o700)
    settings = ("host.bytes=8MiB", f"nvme.paths={tmp_path}/nvme", "nvme.bytes=64MiB")
    layout = two_segments(layers=8, heads=8, dim=64)
    with ForkedDaemon(forker, tmp_path, *settings) as process, kvtier.connect(process.url) as kv:
        ns = kv.namespace(layout, deadline=10)
        attached(kv)
        rng = np.random.default_rng(1)
        for turn in range(6):
            keys = [ns.keys([100 * turn + i] * 4)[0] for i in range(15)]
            numbers = rng.standard_normal((15, layout.raw_bytes // 4), np.float32)
            pages = (numbers.view(np.uint32) & 0xFFFF0000).view(np.uint8)
            assert ns.put(keys[:5], pages[:5], chain=False, deadline=10).stored == 5
            durable = ns.put(keys[5:10], pages[5:10], chain=False, durable="nvme", deadline=10)
            assert (durable.stored, durable.durable) == (5, 5)
            assert (
                ns.put(
                    keys[10:], pages[10:], chain=False, codec=kvtier.Codec.FP8, deadline=10
                ).stored
                == 5
            )
        puts = kv.local.puts
        assert puts.left >= 60
        assert puts.stored == 30


def test_flush_and_write_through_know_of_them(tmp_path, forker):
    (tmp_path / "nvme").mkdir(mode=0o700)
    settings = ("host.bytes=64MiB", f"nvme.paths={tmp_path}/nvme", "nvme.bytes=256MiB")
    with ForkedDaemon(forker, tmp_path, *settings) as process:
        with opened(process) as (kv, ns):
            keys = separate_keys(ns, 0, 60)
            pages = pages_of(keys, NBYTES)
            ns.put(keys[:50], pages[:50], chain=False).raise_for_refused()
            ns.put(keys[40:], pages[40:], chain=False).raise_for_refused()
            assert kv.local.puts == PutCounts(stored=60, existed=10)
            flushed = kv.flush()
            assert flushed.pages_lost == 0
            assert flushed.pages >= 60
            process.kill()
            process.start()
        with opened(process) as (kv, ns):
            assert ns.get(keys).pages == [bytearray(page) for page in pages]


# -- what becomes of a namespace, of a daemon -----------------------------------------------------


def test_a_bump_between_two_puts_is_stale(shared, local):
    kv, ns = local
    keys = ns.keys(range(40))
    pages = pages_of(keys, NBYTES)
    ns.put(keys[:10], pages[:10]).raise_for_refused()
    with remote(shared, ns) as far:
        far.bump()
    assert ns.put(keys, pages).reasons == [PutCode.STALE_GENERATION] * 40
    ns.reopen()
    assert ns.get(keys).reasons == [GetCode.MISS] * 40
    before = kv.local.puts.stored
    assert ns.put(keys, pages).reasons == [PutCode.STORED] * 40
    assert kv.local.puts.stored - before == 40
    assert ns.get(keys).prefix == 40


def test_a_page_that_was_deleted_is_stored_again(local):
    kv, ns = local
    keys = ns.keys(range(4))
    pages = pages_of(keys, NBYTES)
    for turn in range(5):
        pages[:, 9] = turn
        assert ns.put(keys, pages).reasons == [PutCode.STORED] * 4
        assert ns.get(keys).pages == [bytearray(page) for page in pages]
        assert ns.delete(keys).deleted == 4
    assert kv.local.puts == PutCounts(stored=20)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_stopped_daemon_is_a_timeout_and_used_again_when_it_goes_on(shared, is_first):
    """Also when the first put finds it stopped, and there is no writer yet."""
    with opened(shared, tenant=f"stopped {is_first}", deadline=20) as (kv, ns):
        keys = separate_keys(ns, 0, 60)
        pages = pages_of(keys, NBYTES)
        if not is_first:
            ns.put(keys[:4], pages[:4], chain=False).raise_for_refused()
        shared.signal(signal.SIGSTOP)
        try:
            for _ in range(3):
                began = time.monotonic()
                put = ns.put(keys[4:40], pages[4:40], chain=False, deadline=0.3)
                assert time.monotonic() - began < 0.8
                assert set(put.reasons) <= {PutCode.TIMEOUT, PutCode.UNAVAILABLE}
        finally:
            shared.signal(signal.SIGCONT)
        assert kv.ping(deadline=10) > 0
        deadline = time.monotonic() + 5
        for number in range(100, 10_000):
            before = kv.local.puts.stored
            more = separate_keys(ns, 10 * number, 10)
            put = ns.put(more, pages_of(more, NBYTES), chain=False)
            if kv.local.puts.stored - before == 10:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        got = ns.get(keys)
        for item, page, right in zip(got, got.pages, pages, strict=True):
            assert item.reason is GetCode.MISS or page == bytearray(right)
        ns.put(keys, pages, chain=False).raise_for_refused()
        assert ns.get(keys).prefix == 60


def test_a_daemon_that_drains_takes_none(process):
    with opened(process, deadline=3.0) as (kv, ns):
        keys = separate_keys(ns, 0, 4)
        ns.put(keys, pages_of(keys, NBYTES), chain=False).raise_for_refused()
        assert kv.local.puts.stored == 4
        process.signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        for number in range(1, 10_000):
            keys = separate_keys(ns, 10 * number, 4)
            if not (put := ns.put(keys, pages_of(keys, NBYTES), chain=False)).stored:
                break
            assert time.monotonic() < deadline
        assert put.reasons == [PutCode.UNAVAILABLE] * 4
        assert process.wait() == 0


# -- what the daemon keeps count of ---------------------------------------------------------------


def test_puts_are_counted_as_those_over_grpc(shared, local):
    kv, ns = local
    keys = separate_keys(ns, 0, 30)
    pages = pages_of(keys, NBYTES)
    names = ('put_pages_total{code="stored"}', 'put_pages_total{code="exists"}')
    names = [*(f"kvtier_{name}" for name in names), "kvtier_received_bytes_total"]
    before, totals = metrics(shared), kv.status().counters
    ns.put(keys[:20], pages[:20], chain=False).raise_for_refused()
    ns.put(keys, pages, chain=False).raise_for_refused()

    def seen() -> list[float]:
        now = metrics(shared)
        return [now.get(name, 0) - before.get(name, 0) for name in names]

    soon(lambda: seen() == [30, 20, 30 * NBYTES])
    counters = kv.status().counters
    assert counters["put_stored"] - totals.get("put_stored", 0) == 30
    assert counters["put_exists"] - totals.get("put_exists", 0) == 20
    assert counters["stored"] - totals["stored"] == 30


def test_an_idle_client_keeps_no_slots(shared, local):
    kv, ns = local
    name = 'kvtier_local_grant_bytes{{state="{}"}}'.format
    keys = separate_keys(ns, 0, 4)
    ns.put(keys, pages_of(keys, NBYTES), chain=False).raise_for_refused()
    assert metrics(shared)[name("granted")] > 0
    soon(lambda: metrics(shared)[name("granted")] == 0)
    assert metrics(shared)[name("quarantined")] == 0
    # And puts on as before.
    more = separate_keys(ns, 100, 4)
    ns.put(more, pages_of(more, NBYTES), chain=False).raise_for_refused()
    assert asdict(kv.local.puts) == {"stored": 8, "existed": 0, "left": 0, "timed_out": 0}
    kv.close()
    soon(lambda: metrics(shared)[name("granted")] == 0, within_s=0.3)
    assert metrics(shared)[name("quarantined")] == 0


def test_connections_that_come_and_go_leave_nothing(shared):
    name = 'kvtier_local_clients{role="writer"}'
    soon(lambda: metrics(shared)[name] == 0)
    for number in range(10):
        with opened(shared, tenant="come and go") as (kv, ns):
            keys = separate_keys(ns, 10 * number, 3)
            ns.put(keys, pages_of(keys, NBYTES), chain=False).raise_for_refused()
            assert kv.local.puts.stored == 3
            assert metrics(shared)[name] >= 1
    soon(lambda: metrics(shared)[name] == 0)
    granted = 'kvtier_local_grant_bytes{state="granted"}'
    soon(lambda: metrics(shared)[granted] == 0)


def test_who_closes_with_slots_on_their_way_gives_them_back(shared):
    """The answer to what the last put asked for ahead is not here yet, or is not read."""
    for turn in range(6):
        with opened(shared, tenant="on their way") as (kv, ns):
            keys = separate_keys(ns, 100 * turn, 30)
            assert ns.put(keys, pages_of(keys, NBYTES), chain=False).stored == 30
            if turn % 2:
                shared.signal(signal.SIGSTOP)
                more = separate_keys(ns, 5000 + 100 * turn, 30)
                ns.put(more, pages_of(more, NBYTES), chain=False, deadline=0.1)
                kv._async.link.local._standing.attached.puts.close()
                shared.signal(signal.SIGCONT)
        names = [
            f'kvtier_local_grant_bytes{{state="{state}"}}' for state in ("granted", "quarantined")
        ]
        soon(lambda names=names: [metrics(shared)[name] for name in names] == [0, 0])
