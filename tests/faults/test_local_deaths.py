"""Puts by shared memory whose client or daemon is killed, stopped or forked in the middle: nothing
of them is left, nobody's page changes, and no slot is used again while somebody may still write to
it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from fault_rig import metrics, tier_of

import kvtier
from kvtier.core.page import Tier
from tests.client.local_rig import attached
from tests.faults.local_crew import settled
from tests.faults.local_roles import PAGES, STEPS
from tests.forks import ForkedDaemon, daemon_of_its_own

PutCode = kvtier.PutCode
HIT, MISS = kvtier.GetCode.HIT, kvtier.GetCode.MISS
#: Shorter than an idle client keeps its slots.
SETTINGS = (
    "local.grant_ms=200",
    "limits.lease_ms_default=1000",
    "daemon.metrics_listen=127.0.0.1:0",
)
#: Pages of somebody who does nothing wrong.
OTHERS = range(40)
MINE = 10_000


@pytest.fixture(scope="module")
def serving(forker):
    """A daemon of 16 MiB, some 250 pages; a client has its share with 5 of them."""
    with daemon_of_its_own(forker, *SETTINGS) as running:
        yield running


@pytest.fixture
def other(serving):
    """A client that reads and writes by shared memory."""
    with kvtier.connect(serving.url, deadline=20) as kv:
        ns = kv.namespace(PAGES.layout)
        attached(kv)
        yield kv, ns


def grant_bytes(daemon, state: str) -> float:
    return metrics(daemon)[f'kvtier_local_grant_bytes{{state="{state}"}}']


def nothing_is_granted(daemon) -> bool:
    return grant_bytes(daemon, "granted") == grant_bytes(daemon, "quarantined") == 0


def check_books(daemon, kv) -> None:
    """No slot but those of pages that are there, within two seconds; every one of them whole."""
    settled(lambda: nothing_is_granted(daemon))
    host = tier_of(kv, Tier.HOST)
    assert (host.pages_filling, host.pages_retiring, host.pages_quarantined) == (0, 0, 0)
    assert host.pages_pinned == 0
    assert host.used_bytes == host.pages_sealed * PAGES.record_bytes
    assert kv.verify("host").pages_corrupt == 0
    assert metrics(daemon)['kvtier_pages_total{event="condemned"}'] == 0


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_is_killed(serving, other, crew, step):
    kv, ns = other
    PAGES.put(ns, OTHERS, durable=False)
    first = MINE + 100 * list(STEPS).index(step)
    mate = crew.client(serving.url, "put_held", step=step, first=first, count=4)
    assert mate.heard() == "there"
    assert grant_bytes(serving, "granted") + grant_bytes(serving, "quarantined") > 0
    began = time.monotonic()
    mate.kill()
    settled(lambda: nothing_is_granted(serving))
    assert time.monotonic() - began < 2
    check_books(serving, kv)
    assert PAGES.get(ns, OTHERS) == [HIT] * len(OTHERS)
    named = step in ("sent", "answered")
    put = range(first + 4, first + 8)
    assert PAGES.get(ns, range(first, first + 4)) == [HIT] * 4
    assert PAGES.get(ns, put) == [HIT if named else MISS] * 4
    # What it left can be put by others.
    again = ns.put(PAGES.keys(put), [PAGES.page(number) for number in put])
    assert set(again.reasons) == {PutCode.EXISTS if named else PutCode.STORED}
    assert kv.local.puts.left == 0


@pytest.mark.parametrize("role", ["get_held", "lease_held"])
def test_a_reader_is_killed(serving, other, crew, role):
    kv, ns = other
    mate = crew.client(serving.url, role, first=MINE + 900, count=4)
    assert mate.heard() == "there"
    mate.kill()
    settled(lambda: tier_of(kv, Tier.HOST).pages_pinned == 0, within_s=10)
    check_books(serving, kv)
    assert PAGES.get(ns, range(MINE + 900, MINE + 904)) == [HIT] * 4


def press(ns, first: int, count: int) -> None:
    """Puts more pages than there is room for."""
    for at in range(first, first + count, 20):
        PAGES.put(ns, range(at, at + 20), durable=False)


def check_all(ns, numbers: range) -> None:
    """Each is its own page or gone, most of the last ones are there."""
    codes = PAGES.get(ns, numbers)
    assert set(codes) <= {HIT, MISS}
    assert codes.count(HIT) > 150


@pytest.mark.parametrize("step", [pytest.param("half", marks=pytest.mark.soak), "copied"])
def test_a_writer_that_is_stopped_past_its_grant_changes_nobodys_page(serving, other, crew, step):
    """Its slots would be used again several times if they were free."""
    kv, ns = other
    first = {"half": 100_000, "copied": 200_000}[step]
    mate = crew.client(serving.url, "put_held", step=step, first=first, count=4, stops=True)
    assert mate.heard() == "there"
    settled(lambda: grant_bytes(serving, "granted") == 0 and grant_bytes(serving, "quarantined"))
    left = kv.local.puts.left
    press(ns, first + 1000, 600)
    assert kv.local.puts.left == left
    assert grant_bytes(serving, "quarantined") >= 4 * PAGES.record_bytes
    refused = 'kvtier_refused_commits_total{reason="stale"}'
    stale = metrics(serving)[refused]
    mate.signal(signal.SIGCONT)
    said = mate.heard()
    assert said["codes"] == ["STORED"] * 4
    assert said["stored"] + said["left"] == 4
    assert said["left"] > 0
    assert metrics(serving)[refused] - stale == said["left"]
    check_all(ns, range(first + 1000, first + 1600))
    assert PAGES.get(ns, range(first + 4, first + 8)) == [HIT] * 4
    settled(lambda: grant_bytes(serving, "quarantined") == 0)
    check_books(serving, kv)


def test_a_writer_whose_socket_is_closed_and_that_writes_on(serving, other, crew):
    """Its slots stay out of use until its process has ended."""
    kv, ns = other
    mate = crew.client(serving.url, "write_on")
    count = mate.heard()
    assert count > 0
    settled(lambda: grant_bytes(serving, "quarantined") == count * PAGES.record_bytes)
    press(ns, 30_000, 600)
    check_all(ns, range(30_000, 30_600))
    # Those of the other client are given back when it does not use them.
    settled(lambda: grant_bytes(serving, "granted") == 0)
    settled(lambda: grant_bytes(serving, "quarantined") == count * PAGES.record_bytes)
    mate.kill()
    check_books(serving, kv)
    check_all(ns, range(30_000, 30_600))


def test_who_leaves_too_much_in_quarantine_gets_no_slots_and_puts_all_the_same(
    serving, other, crew
):
    kv, _ = other
    mate = crew.client(serving.url, "hoard", first=MINE + 2000, count=4)
    taken = mate.heard()
    kept = grant_bytes(serving, "quarantined")
    assert kept == sum(taken) * PAGES.record_bytes
    assert kept < 0.05 * tier_of(kv, Tier.HOST).capacity_bytes + max(taken) * PAGES.record_bytes
    mate.tell()
    said = mate.heard()
    assert (said["codes"], said["stored"], said["left"]) == (["STORED"] * 4, 0, 4)
    mate.kill()
    check_books(serving, kv)
    PAGES.put(other[1], range(MINE + 2100, MINE + 2104), durable=False)
    assert kv.local.puts.stored == 4


def test_a_fork_while_a_put_runs(serving, other, crew):
    """The child is refused and has none of the memory; the parent's slots are its own."""
    kv, ns = other
    mate = crew.client(serving.url, "fork_in_put", first=MINE + 3000, count=4)
    assert mate.heard() == "there"
    mate.tell()
    said = mate.heard()
    assert said["child"] == 7
    assert said["codes"] == ["STORED"] * 4
    assert PAGES.get(ns, range(MINE + 3000, MINE + 3005)) == [HIT] * 5
    mate.tell()
    check_books(serving, kv)


@pytest.mark.parametrize("step", ["half", pytest.param("answered", marks=pytest.mark.soak)])
def test_the_daemon_is_killed_while_a_client_puts(crew, base, step, forker):
    deadline = 2.0
    options = {"first": MINE + 4000, "count": 4, "deadline": deadline}
    with ForkedDaemon(forker, base, *SETTINGS) as daemon:
        mate = crew.client(daemon.url, "put_held", step=step, **options)
        assert mate.heard() == "there"
        daemon.kill()
        mate.tell()
        said = mate.heard()
        assert step != "answered" or said["codes"] == ["STORED"] * 4
        if step == "answered":
            said = next_of(mate)
        assert said["codes"] == ["UNAVAILABLE"] * 4
        assert said["stored"] == 0
        assert said["took_s"] < deadline + 0.5
        daemon.start()
        began = time.monotonic()
        while (said := next_of(mate))["stored"] < 4:
            assert time.monotonic() - began < 5, said
            time.sleep(0.05)
        # The arena to read, the arena to write, and the directory: those of one daemon.
        assert said["maps"] == 3
        with kvtier.connect(daemon.url, deadline=10) as kv:
            ns = kv.namespace(PAGES.layout)
            assert PAGES.get(ns, range(said["first"], said["first"] + 4)) == [HIT] * 4
            mate.kill()
            check_books(daemon, kv)


def next_of(mate):
    """What became of its next put."""
    mate.tell()
    said = mate.heard()
    if said == "there":
        mate.tell()
        said = mate.heard()
    return said


def test_descriptors_of_writers_are_let_go_of(serving, other, crew):
    """Clients that are killed leave the daemon no descriptor."""
    kv, _ = other
    fds = Path(f"/proc/{serving.pid}/fd")

    def count() -> int:
        return len(os.listdir(fds))

    before = count()
    for number in range(2):
        mates = [
            crew.client(serving.url, "put_held", step="half", first=MINE + 5000, count=1 + number)
            for _ in range(2)
        ]
        for mate in mates:
            assert mate.heard() == "there"
        for mate in mates:
            mate.kill()
    check_books(serving, kv)
    settled(lambda: count() <= before + 1, within_s=5)
