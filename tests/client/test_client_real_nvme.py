"""The client against a real daemon with an NVMe tier: what is said to be durable survives a kill,
and a stopped daemon holds nobody up.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path

import pytest

import kvtier
from kvtier.client import FlushResult
from tests.client.test_client_failures import comes_back, within
from tests.forks import ForkedDaemon

GetCode, PutCode, Tier = kvtier.GetCode, kvtier.PutCode, kvtier.Tier
PAGES = 8


@pytest.fixture
def base():
    made = Path(tempfile.mkdtemp(prefix="kvt-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def process(base, forker):
    """Copies go down to NVMe only when they are asked to."""
    settings = (f"nvme.paths={base / 'disk'}", "nvme.bytes=64MiB", "nvme.clean_percent=0")
    with ForkedDaemon(forker, base, *settings) as running:
        yield running


@pytest.fixture
def kv(process):
    with kvtier.connect(process.url, deadline=10.0) as connection:
        yield connection


def killed_and_started(process):
    process.signal(signal.SIGKILL)
    process.wait()
    process.start()


def test_durable_pages_survive_a_kill(process, kv, ns, make_pages):
    keys, pages = ns.keys(range(4 * PAGES)), make_pages(PAGES)
    put = ns.put(keys, pages, durable="nvme")
    put.raise_for_refused()
    assert (put.stored, put.durable) == (PAGES, PAGES)
    again = ns.put(keys, pages, durable="nvme")
    assert (again.reasons, again.durable) == ([PutCode.EXISTS] * PAGES, PAGES)
    killed_and_started(process)
    assert comes_back(lambda: ns.lookup(keys).hits == PAGES)
    assert {item.tier for item in ns.lookup(keys)} == {Tier.NVME}
    got = ns.get(keys)
    assert got.pages == pages
    assert {item.tier for item in got} == {Tier.NVME}


def test_flush_says_what_is_durable(process, kv, ns, make_pages):
    keys, pages = ns.keys(range(4 * PAGES)), make_pages(PAGES)
    put = ns.put(keys, pages)
    assert (put.stored, put.durable) == (PAGES, 0)
    assert kv.flush() == FlushResult(pages=PAGES, pages_lost=0)
    assert kv.flush() == FlushResult(pages=0, pages_lost=0)
    killed_and_started(process)
    assert comes_back(lambda: ns.get(keys).pages == pages)


def test_demote_and_prefetch(process, kv, ns, make_pages):
    keys, pages = ns.keys(range(4 * PAGES)), make_pages(PAGES)
    ns.put(keys[:-1], pages[:-1])
    down = ns.demote(keys)
    assert down.reasons == [GetCode.HIT] * (PAGES - 1) + [GetCode.MISS]
    assert comes_back(lambda: pages_in(kv, Tier.NVME) == PAGES - 1)
    killed_and_started(process)
    assert comes_back(lambda: ns.prefetch(keys).prefix == PAGES - 1)
    assert comes_back(lambda: pages_in(kv, Tier.HOST) == PAGES - 1)
    got = ns.get(keys[:-1])
    assert got.pages == pages[:-1]
    assert {item.tier for item in got} == {Tier.HOST}


def pages_in(kv, tier):
    return {found.tier: found.pages_sealed for found in kv.status().tiers}[tier]


def test_a_stopped_daemon_holds_nobody_up(process, kv, ns, make_pages):
    keys, pages = ns.keys(range(8)), make_pages(2)
    ns.put(keys, pages)
    process.signal(signal.SIGSTOP)
    try:
        assert within(0.3, lambda: ns.prefetch(keys, deadline=0.3)).reasons == [GetCode.TIMEOUT] * 2
        assert within(0.3, lambda: ns.demote(keys, deadline=0.3)).reasons == [GetCode.TIMEOUT] * 2
        put = within(0.3, lambda: ns.put(keys, pages, durable="nvme", deadline=0.3))
        assert put.reasons == [PutCode.TIMEOUT] * 2
        assert put.durable == 0
        for call in (
            lambda: kv.flush(deadline=0.3),
            lambda: kv.verify("nvme", deadline=0.3),
            lambda: kv.quarantine.list(deadline=0.3),
        ):
            with pytest.raises((kvtier.DeadlineExceeded, kvtier.DaemonUnavailable)):
                within(0.3, call)
    finally:
        process.signal(signal.SIGCONT)
    assert comes_back(lambda: ns.prefetch(keys).prefix == 2)
    assert kv.flush().pages_lost == 0


def test_devices(process, kv, ns, make_pages):
    ns.put(ns.keys(range(4 * PAGES)), make_pages(PAGES), durable="nvme").raise_for_refused()
    (device,) = kv.status().devices
    assert (device.path, device.is_online) == (str(process.base / "disk"), True)
    assert 0 < device.disk_bytes <= device.capacity_bytes <= 64 << 20
    assert device.is_direct_io or device.reason, "a lesser way is said"
    assert kv.quarantine.list() == ()
    assert Tier.NVME in kv.capabilities().tiers


def test_damage_on_disk_is_found_kept_and_cleared(process, kv, ns, make_pages):
    keys, pages = ns.keys(range(4 * PAGES)), make_pages(PAGES)
    ns.put(keys, pages, durable="nvme").raise_for_refused()
    seen = []
    found = kv.verify("nvme", on_progress=seen.append)
    assert (found.pages_done, found.pages_total, found.pages_corrupt) == (PAGES, PAGES, 0)
    assert seen[-1] == found
    flip_payload_bytes(process.base / "disk", pages)
    found = kv.verify("nvme")
    assert (found.pages_done, found.pages_corrupt) == (PAGES, PAGES)
    kept = kv.quarantine.list()
    assert sorted(page.key for page in kept) == sorted(keys)
    assert {page.ref.tier for page in kept} == {Tier.NVME}
    assert len(kv.quarantine.read(kept[0].ref)) == 8192
    assert kv.quarantine.clear([kept[0].ref]) == 1
    assert kv.quarantine.clear() == PAGES - 1
    assert kv.quarantine.list() == ()
    got = ns.get(keys)
    assert got.pages == pages, "the copies in host memory are good"
    assert {item.tier for item in got} == {Tier.HOST}


def flip_payload_bytes(disk, pages):
    """One bit of every stored payload, in place, in the segment files."""
    flipped = 0
    for path in disk.glob("segment-*"):
        data = path.read_bytes()
        for page in pages:
            at = data.find(page)
            if at >= 0:
                with path.open("r+b") as file:
                    file.seek(at + 100)
                    file.write(bytes([data[at + 100] ^ 1]))
                flipped += 1
    assert flipped == len(pages)
