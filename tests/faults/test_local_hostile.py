"""A writer that keeps no rule beside clients that do: whatever it sends and wherever it writes, the
daemon goes on, and no hit of anybody else holds a wrong byte.
"""

from __future__ import annotations

import random
import time
from collections import Counter

import numpy as np
import pytest
from fault_rig import metrics, tier_of

import kvtier
from kvtier.core.page import Tier
from kvtier.packing.checksum import payload_sum
from kvtier.transfer.planes.deadline import Deadline
from tests.client.local_rig import attached
from tests.faults.local_crew import settled
from tests.faults.local_fuzz import HONEST
from tests.faults.local_roles import PAGE, PAGES, common, granted
from tests.forks import ForkedDaemon

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode
HIT = GetCode.HIT


def honest(ns, rng: random.Random, seen: Counter, goes_on) -> None:
    """Puts, deletes and gets pages of which the other knows the keys. `Pages.get` compares."""
    while goes_on():
        some = sorted(rng.sample(HONEST, 12))
        what = rng.random()
        if what < 0.3:
            pages = [PAGES.page(number) for number in some]
            put = ns.put(PAGES.keys(some), pages, chain=rng.random() < 0.5)
            seen.update(f"put {code.name}" for code in put.reasons)
        elif what < 0.4:
            ns.delete(PAGES.keys(some[:3]))
        else:
            seen.update(f"get {code.name}" for code in PAGES.get(ns, some))


def hostility(daemon, crew, *, seed: int, seconds: float, noise: bool) -> tuple[Counter, Counter]:
    """What the client that keeps the rules saw, and the other; the daemon is well afterwards."""
    print(f"seed {seed}")  # noqa: T201
    pid = daemon.pid
    mate = crew.client(daemon.url, "fuzz", seed=seed, seconds=seconds, writers=3, noise=noise)
    seen: Counter = Counter()
    with kvtier.connect(daemon.url, deadline=20) as kv:
        ns = kv.namespace(PAGES.layout)
        attached(kv)
        assert mate.heard() == "there"
        until = time.monotonic() + seconds
        honest(ns, random.Random(seed), seen, lambda: time.monotonic() < until)
        told = Counter(mate.heard())
        puts = kv.local.puts
        mate.kill()
        settled(lambda: no_grants(daemon), within_s=3)
        kv.verify("host")  # what it has damaged, or never written, is found and condemned
        host = tier_of(kv, Tier.HOST)
        assert (host.pages_filling, host.pages_retiring, host.pages_pinned) == (0, 0, 0)
        pages = host.pages_sealed + host.pages_quarantined
        assert host.used_bytes == pages * PAGES.record_bytes
        assert kv.verify("host").pages_corrupt == 0
        # It serves as before.
        ns.delete(PAGES.keys(HONEST))
        PAGES.put(ns, range(50_000, 50_050), durable=False)
        assert PAGES.get(ns, range(50_000, 50_050)) == [HIT] * 50
        assert kv.local.puts.stored - puts.stored == 50
    assert daemon.pid == pid
    print(seen, told)  # noqa: T201
    assert "task.crashed" not in daemon.log
    assert "Traceback" not in daemon.log
    return seen, told


def no_grants(daemon) -> bool:
    found = metrics(daemon)
    states = ("granted", "quarantined")
    return not any(found[f'kvtier_local_grant_bytes{{state="{state}"}}'] for state in states)


SETTINGS = ("local.grant_ms=300", "daemon.metrics_listen=127.0.0.1:0")


def test_random_frames(base, crew, forker):
    """Random generations, names, sizes, keys and sums; garbage; the same frame again."""
    with ForkedDaemon(forker, base, *SETTINGS) as daemon:
        seen, told = hostility(daemon, crew, seed=1, seconds=1.0, noise=False)
    assert {"put STORED", "put EXISTS", "get HIT", "get MISS"} <= set(seen)
    assert {"STORED", "STALE_GENERATION", "REFUSED", "InvalidFrame"} <= set(told)
    assert told["before hello"] > 0


def test_noise_all_over_the_arena(base, crew, forker):
    """Every byte of every record, its header too, may be written by anybody who may write."""
    with ForkedDaemon(forker, base, *SETTINGS) as daemon:
        seen, told = hostility(daemon, crew, seed=2, seconds=3.0, noise=True)
    assert told["scribbles"] > 100
    assert seen["get HIT"] > 0
    assert seen["get CORRUPT"] > 0


@pytest.fixture
def by_hand(base, forker):
    """A daemon, a client of it, and a writer whose frames are made here."""
    with (
        ForkedDaemon(forker, base, *SETTINGS) as daemon,
        kvtier.connect(daemon.url, deadline=20) as kv,
    ):
        ns = kv.namespace(PAGES.layout)
        attached(kv)
        writer, grants = granted(kv, ns)
        yield kv, ns, writer, grants
        writer.close()
        del writer._arena  # pytest keeps what it gave


def sealed(ns, writer, numbers, grants, *, length=PAGE) -> list[PutCode]:
    """Writes pages to these slots and names them; what became of them."""
    for number, grant in zip(numbers, grants, strict=True):
        begin = (grant.slot + 1) * 4096
        writer._arena[begin : begin + PAGE] = np.frombuffer(PAGES.page(number), np.uint8)
    opened = ns._async.opened
    made = [
        payload_sum(
            PAGES.page(number),
            key=PAGES.key(number),
            fingerprint=opened.fingerprint,
            namespace_generation=opened.generation,
            shard=0,
            codec=kvtier.Codec.RAW,
            length=PAGE,
        )
        for number in numbers
    ]
    writer.send(
        common(ns, length),
        Deadline.after(5),
        keys=b"".join(PAGES.keys(numbers)),
        parents=bytes(32 * len(numbers)),
        depths=bytes(4 * len(numbers)),
        sums=b"".join(made),
        generations=np.array([grant.generation for grant in grants], "<u8").tobytes(),
    )
    return [PutCode(code) for code in writer.receive(Deadline.after(5)).codes]


@pytest.mark.parametrize("length", [PAGE - 1, PAGE + 1])
def test_pages_of_another_length_are_refused(by_hand, length):
    """They would lie in a slot of the same size, and no get could read them."""
    kv, ns, writer, grants = by_hand
    used = tier_of(kv, Tier.HOST).pages_filling
    assert sealed(ns, writer, [1, 2], grants[:2], length=length) == [PutCode.REFUSED] * 2
    assert tier_of(kv, Tier.HOST).pages_filling == used - 2
    assert ns.lookup(PAGES.keys([1, 2])).hits == 0
    PAGES.put(ns, [1, 2], durable=False)
    assert PAGES.get(ns, [1, 2]) == [HIT] * 2


def test_a_grant_that_is_named_twice_is_the_first_page(by_hand):
    kv, ns, writer, grants = by_hand
    first, second = grants[:2]
    codes = sealed(ns, writer, [3, 1, 2], [first, second, second])
    assert codes == [PutCode.STORED, PutCode.STORED, PutCode.STALE_GENERATION]
    # The slot holds page 2 by now, and is named as page 1: that is found out by its sum alone.
    assert PAGES.get(ns, [3, 2]) == [HIT, GetCode.MISS]
    assert PAGES.get(ns, [1]) == [GetCode.CORRUPT]
    assert kv.quarantine.list()[0].key == PAGES.key(1)


def test_a_frame_again_is_stale_and_changes_nothing(by_hand):
    kv, ns, writer, grants = by_hand
    assert sealed(ns, writer, [1, 2], grants[:2]) == [PutCode.STORED] * 2
    for _ in range(3):
        assert sealed(ns, writer, [1, 2], grants[:2]) == [PutCode.STALE_GENERATION] * 2
    assert PAGES.get(ns, [1, 2]) == [HIT] * 2
    with kvtier.connect(kv.url, deadline=10, plane="grpc") as other:
        assert PAGES.get(other.namespace(PAGES.layout), [1, 2]) == [HIT] * 2


def test_grants_of_another_writer_are_not_ones_own(by_hand):
    kv, ns, writer, grants = by_hand
    thief, _ = granted(kv, ns)
    assert sealed(ns, thief, [1, 2], grants[:2]) == [PutCode.STALE_GENERATION] * 2
    thief._late = [grant.generation for grant in grants]
    thief.give_back(Deadline.after(5))
    assert sealed(ns, writer, [1, 2], grants[:2]) == [PutCode.STORED] * 2
    assert PAGES.get(ns, [1, 2]) == [HIT] * 2
    thief.close()


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(10, 14))
@pytest.mark.parametrize("noise", [False, True])
def test_a_hostile_writer_for_long(base, crew, seed, noise, forker):
    with ForkedDaemon(forker, base, *SETTINGS) as daemon:
        seen, _ = hostility(daemon, crew, seed=seed, seconds=30, noise=noise)
    assert seen["get HIT"] > 0
