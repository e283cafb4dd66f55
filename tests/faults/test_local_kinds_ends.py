"""Kinds of faults of processes that end and of memory, on the local plane: each test asserts by
`kv.local` that shared memory was used. The others are in test_local_kinds.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fault_rig import tier_of

import kvtier
from kvtier.core.page import Tier
from kvtier.testing.daemon_process import DaemonProcess
from tests.faults.local_crew import client, settled, store
from tests.faults.local_roles import PAGE, PAGES
from tests.forks import ForkedDaemon, daemon_of_its_own

PutCode = kvtier.PutCode
HIT, MISS = kvtier.GetCode.HIT, kvtier.GetCode.MISS
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def serving(forker):
    """A daemon of 16 MiB, some 250 pages."""
    with daemon_of_its_own(forker, "local.grant_ms=1000") as running:
        yield running


@pytest.fixture
def local(serving):
    with client(serving) as pair:
        yield pair


def test_kind_15_daemondeath_with_many_at_work(base, forker):
    """Every call ends in time; hits and local puts are back within five seconds."""
    deadline = 1.0
    slowest: list[float] = []
    is_over = threading.Event()
    with ForkedDaemon(forker, base) as daemon, client(daemon, deadline=deadline) as (kv, ns):
        store(ns, range(20)).raise_for_refused()

        def work(number: int) -> None:
            rng = random.Random(number)
            while not is_over.is_set():
                some = rng.sample(range(300), 6)
                began = time.monotonic()
                if number % 3 == 0:
                    ns.lookup(PAGES.keys(some))
                elif number % 3 == 1:
                    PAGES.get(ns, some)
                else:
                    store(ns, some)
                slowest.append(time.monotonic() - began)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        daemon.kill()
        time.sleep(0.3)
        daemon.start()
        time.sleep(0.1)
        is_over.set()
        for thread in threads:
            thread.join(10)
        assert max(slowest) < deadline + 0.5
        puts, hits = kv.local.puts.stored, kv.local.counts.hits

        draw = random.Random(9)

        def is_back() -> bool:
            some = draw.sample(range(1000, 9000), 4)
            store(ns, some)
            PAGES.get(ns, some)
            return kv.local.puts.stored > puts and kv.local.counts.hits > hits

        settled(is_back, within_s=5)


def test_kind_36_stalewrite_after_a_bump(serving, crew):
    """A put that is held while its namespace ends is written to nobody's page, and to none."""
    with client(serving) as (kv, ns):
        mate = crew.client(serving.url, "put_held", step="copied", first=10_000, count=4)
        assert mate.heard() == "there"
        ns.bump()
        ns.reopen()
        store(ns, range(10_004, 10_008), version=2).raise_for_refused()
        mate.tell()
        said = mate.heard()
        assert said["codes"] == ["STALE_GENERATION"] * 4
        assert said["stored"] == 0
        assert PAGES.get(ns, range(10_004, 10_008), version=2) == [HIT] * 4
        assert kv.local.puts.stored == 4
        mate.kill()


def test_kind_36_stalewrite_after_another_put(serving, local, crew):
    """Who names its pages late finds them there, and they are not changed."""
    kv, ns = local
    mate = crew.client(serving.url, "put_held", step="copied", first=11_000, count=4)
    assert mate.heard() == "there"
    store(ns, range(11_004, 11_008), version=2).raise_for_refused()
    assert kv.local.puts.stored == 4
    mate.tell()
    assert set(mate.heard()["codes"]) == {"EXISTS"}
    assert PAGES.get(ns, range(11_004, 11_008), version=2) == [HIT] * 4
    mate.kill()


LIMITED = """
import resource, sys, time, kvtier
from tests.faults.fault_rig import Pages
pages = Pages(60_000, "local")
kv = kvtier.connect(sys.argv[1], deadline=10)
if sys.argv[2] == "as":
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (200 << 20), resource.RLIM_INFINITY))
ns = kv.namespace(pages.layout)
until = time.monotonic() + 30
while kv.local.reason in ("attaching", "no namespace was opened yet") and time.monotonic() < until:
    time.sleep(0.01)
put = ns.put(pages.keys(range(30_000, 30_004)), [pages.page(n) for n in range(30_000, 30_004)])
print(put.stored, kv.local.is_attached, kv.local.puts.stored, kv.local.reason)
kv.close()
"""


def test_kind_37_pinnedmem_without_locked_memory(serving):
    """Nothing is pinned: a client that may lock nothing uses shared memory all the same."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, serving.url, "memlock"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)),
    )
    assert done.stdout.split()[:3] == ["4", "True", "4"], done.stderr


def resident_bytes() -> int:
    status = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(status[1]) - int(status[2])) * resource.getpagesize()  # without what is shared


def test_kind_37_pinnedmem_is_flat(local):
    """Hundreds of puts and gets keep no memory of their own, and map nothing more."""
    kv, ns = local
    numbers = range(40_000, 40_008)
    pages = [PAGES.page(number) for number in numbers]
    out = np.empty((8, PAGE), np.uint8)

    def turn() -> None:
        keys = [os.urandom(32) for _ in numbers]
        ns.put(keys, pages, chain=False)
        ns.get(keys, out=out)

    for _ in range(50):
        turn()
    before, maps = resident_bytes(), Path("/proc/self/maps").read_text().count("memfd:kvtier")
    for _ in range(150):
        turn()
    assert kv.local.puts.stored == 1600
    assert resident_bytes() - before < 8 << 20
    assert Path("/proc/self/maps").read_text().count("memfd:kvtier") == maps == 3


def test_kind_20_clientdeath_at_any_moment(serving, local, crew):
    """Clients that are killed while they put, whenever: others see no wrong page, the daemon
    answers at once, and no slot is lost."""
    kv, ns = local
    rng = random.Random(20)
    for turn in range(4):
        mates = [
            crew.client(serving.url, "put_loop", first=50_000 + 10_000 * n, seed=turn)
            for n in range(2)
        ]
        for mate in mates:
            assert mate.heard() == "there"
        time.sleep(rng.random() * 0.05)
        for mate in mates:
            mate.kill()
        assert kv.ping() < 0.5
        for n in range(2):
            assert set(PAGES.get(ns, range(50_000 + 10_000 * n, 50_200 + 10_000 * n))) <= {
                HIT,
                MISS,
            }

    kv.quarantine.clear()  # of damaged pages

    def is_whole() -> bool:
        host = tier_of(kv, Tier.HOST)
        return (host.pages_filling, host.pages_quarantined, host.pages_pinned) == (0, 0, 0)

    settled(is_whole)
    host = tier_of(kv, Tier.HOST)
    assert host.used_bytes == host.pages_sealed * PAGES.record_bytes


def test_kind_26_shm(base, crew):
    """A tiny /dev/shm is none of its concern, no name is left anywhere, and the memory outlives a
    client that was killed with it mapped."""
    if subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces")
    small = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    before = sorted(os.listdir("/dev/shm"))
    prefix = ("unshare", "-Urm", "sh", "-c", small, "sh")
    with DaemonProcess(base, "host.bytes=64MiB", prefix=prefix) as daemon:
        with client(daemon) as (kv, ns):
            mate = crew.client(daemon.url, "put_held", step="half", first=0, count=4)
            assert mate.heard() == "there"
            mate.kill()
            assert store(ns, range(100, 500)).reasons == [PutCode.STORED] * 400
            assert PAGES.get(ns, range(100, 500)) == [HIT] * 400
            assert kv.local.puts.left == 0
        assert sorted(os.listdir("/dev/shm")) == before
