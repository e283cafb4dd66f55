"""KV events over real sockets, of a real daemon."""

from __future__ import annotations

import signal
import stat
import time
from pathlib import Path

import pytest
from event_rig import HOST, NVME, free_endpoints, names_of, told
from event_router import zmq
from pool_rig import PAGES, hashes, pool_with_heads, store_for

import kvtier
from kvtier.core.page import Tier
from kvtier.errors import InvalidConfigValue
from kvtier_sglang.events.outlet import Endpoints, Outlet
from tests.forks import daemon_of_its_own


@pytest.fixture
def rig(daemon):
    with told(daemon.url) as made:
        yield made


def test_a_prompt_is_told_with_its_tokens_and_in_order(rig):
    rig.publish()
    router = rig.router()
    keys = rig.prompt(7)
    router.listen(until=rig.agrees(router))
    assert router.believed[HOST] == names_of(keys)
    parents = [None, *(name for name in map(rig_name, keys))][:-1]
    told_of = [router.blocks[rig_name(key)] for key in keys]
    assert [parent for parent, _ in told_of] == parents
    assert [token for _, tokens in told_of for token in tokens] == list(range(7000, 7032))


def rig_name(key):
    (name,) = names_of([key])
    return name


def test_who_comes_late_asks_and_knows_all(rig):
    rig.publish()
    early = rig.router()
    for number in range(3):
        rig.prompt(number)
    early.listen(until=rig.agrees(early))
    late = rig.router()
    late.listen(until=rig.agrees(late))
    assert late.believed == early.believed


def test_pages_are_told_when_their_tokens_are_asked_for(rig):
    """Those of another server: here before this one has seen the prompt."""
    keys = rig.prompt(1)
    rig.publish()
    router = rig.router()
    router.listen(until=lambda: router.received > 0)
    assert not router.believed[HOST]
    rig.prompt(1)
    router.listen(until=lambda: router.believed[HOST] == names_of(keys))


def test_while_weights_are_updated_nothing_is_told_and_then_what_is_new(rig):
    rig.publish()
    router = rig.router()
    rig.prompt(0)
    router.listen(until=rig.agrees(router))
    rig.store.pause()
    router.listen(until=lambda: not router.believed[HOST])
    rig.store.resume("r2")
    rig.keys.clear()
    keys = rig.prompt(1, pages=2)
    router.listen(until=lambda: router.believed[HOST] == names_of(keys))


def test_a_publisher_that_ends_leaves_nothing_to_believe_in(rig):
    made = rig.publish()
    router = rig.router()
    rig.prompt(0)
    router.listen(until=rig.agrees(router))
    made.close()
    router.listen(until=lambda: not router.believed[HOST])


def test_a_publisher_that_fails_leaves_nothing_to_believe_in(rig, caplog):
    rig.publish()
    router = rig.router()
    rig.prompt(0)
    router.listen(until=rig.agrees(router))
    rig.publishers[0]._blocks = None
    rig.prompt(1)
    router.listen(until=lambda: not router.believed)
    assert "publishing KV events failed" in caplog.text


@pytest.fixture
def rounding(forker, tmp_path):
    """A daemon that packs what it writes to NVMe, and writes everything."""
    (tmp_path / "nvme").mkdir(mode=0o700)
    settings = ("nvme.bytes=64MiB", "nvme.codec=fp8", "nvme.write_policy=through")
    with daemon_of_its_own(
        forker, "host.bytes=64MiB", f"nvme.paths={tmp_path}/nvme", *settings
    ) as running:
        yield running


def until_on_nvme(connection, pages):
    ends = time.monotonic() + 60
    while True:
        tiers = {tier.tier: tier for tier in connection.status(deadline=10).tiers}
        if tiers[Tier.NVME].pages_sealed == pages:
            return
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_copies_that_the_daemon_rounded_are_told_to_nobody_who_cannot_have_them(rounding):
    with told(rounding.url) as rig:
        rig.publish()
        router = rig.router()
        first = rig.prompt(1)
        until_on_nvme(rig.connection, 2 * PAGES)
        # Changes come in order: when those of the second prompt are here, all of the first are.
        both = names_of(first + rig.prompt(2))
        router.listen(until=lambda: router.believed[HOST] == both)
        assert not router.believed[NVME]
        # Who begins now has them from the snapshot.
        rig.publishers.pop().close()
        rig.publish()
        late = rig.router()
        rig.prompt(1)
        rig.prompt(2)
        late.listen(until=lambda: late.believed[HOST] == both)
        assert not late.believed[NVME]


@pytest.mark.parametrize("plane", ["grpc", "auto"])
def test_pages_that_only_a_rounded_copy_is_left_of_are_not_there(rounding, plane):
    everything = list(range(PAGES))
    with kvtier.connect(rounding.url, deadline=10) as kv:
        assert all(
            store_for(kv, pool_with_heads("page_first_direct")).set(hashes(PAGES), everything)
        )
        until_on_nvme(kv, 2 * PAGES)
    rounding.stop()
    rounding.start()
    with kvtier.connect(rounding.url, deadline=10, plane=plane) as kv:
        store = store_for(kv, pool_with_heads("page_first_direct"), exists_deadline=5.0)
        namespace = store._parts[0].namespace
        assert namespace.lookup(namespace.keys_from(hashes(PAGES))).prefix == PAGES
        assert store.get(hashes(PAGES), everything) == [False] * PAGES
        assert store.exists(hashes(PAGES)) == 0
        assert store.present(hashes(PAGES)) == [False] * PAGES


@pytest.mark.parametrize("kept", [0, 2, 4, 5])
def test_who_asks_gets_what_is_missing_or_all(tmp_path, kept):
    """Batches from the first wanted on, where all of them are kept; else what holds, numbered so
    that the next one follows. `kept` is how many of the five are wanted.
    """
    endpoints = Endpoints(events=f"ipc://{tmp_path}/e", replay=f"ipc://{tmp_path}/r", topic="kv")
    outlet = Outlet(endpoints)
    context = zmq.Context()
    try:
        assert stat.S_IMODE(Path(tmp_path, "e").stat().st_mode) == 0o600
        for number in range(5):
            outlet.publish(b"%d" % number)
        latest = outlet._number
        router = context.socket(zmq.DEALER)
        router.connect(endpoints.replay)

        def ask(first):
            router.send_multipart([b"", first.to_bytes(8, "big")])
            told_of = []
            while True:
                if not router.poll(10):
                    outlet.answer(lambda: [b"clear", b"all"])
                    continue
                empty, topic, number, batch = router.recv_multipart()
                assert empty == b""
                told_of.append((int.from_bytes(number, "big", signed=True), batch))
                if told_of[-1] == (-1, b""):
                    return told_of[:-1]
                assert topic == b"kv"

        wanted = ask(latest + 1 - kept)
        assert [batch for _, batch in wanted] == [b"%d" % i for i in range(5 - kept, 5)]
        assert [number for number, _ in wanted] == list(range(latest + 1 - kept, latest + 1))
        assert ask(latest - 5) == ask(0) == [(latest - 1, b"clear"), (latest, b"all")]
        assert ask(latest + 2) == ask(0), "of another publisher"
    finally:
        context.destroy(linger=0)
        outlet.close()


def test_a_question_that_makes_no_sense_is_passed_over(tmp_path):
    endpoints = Endpoints(events=f"ipc://{tmp_path}/e", replay=f"ipc://{tmp_path}/r")
    outlet = Outlet(endpoints)
    context = zmq.Context()
    try:
        router = context.socket(zmq.DEALER)
        router.connect(endpoints.replay)
        for frames in ([b"x"], [b"", b"short"], [b"", b"", b"", b""], [b"", bytes(8)]):
            router.send_multipart(frames)
        while not router.poll(10):
            outlet.answer(lambda: [b"all"])
        assert router.recv_multipart()[3] == b"all"
    finally:
        context.destroy(linger=0)
        outlet.close()


@pytest.mark.parametrize(
    ("endpoint", "dp_rank", "bound"),
    [
        ("tcp://127.0.0.1:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://localhost:5557", 2, "tcp://localhost:5559"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("ipc:///run/e", 0, "ipc:///run/e"),
        ("ipc:///run/e", 3, "ipc:///run/e_dp3"),
        ("tcp://*:5557", 0, None),
        ("tcp://0.0.0.0:5557", 0, None),
        ("tcp://10.0.0.1:5557", 0, None),
        ("tcp://example.org:5557", 0, None),
    ],
)
def test_where_events_may_be_served(endpoint, dp_rank, bound):
    endpoints = Endpoints(events=endpoint)
    if bound is None:
        with pytest.raises(InvalidConfigValue, match="other machines"):
            endpoints.checked(allows_network=False, dp_rank=dp_rank)
    made = endpoints.checked(allows_network=True, dp_rank=dp_rank)
    assert made.events == (bound or endpoint)


@pytest.mark.parametrize("endpoint", ["5557", "udp://127.0.0.1:1", "tcp://127.0.0.1", "tcp://:x"])
def test_what_is_no_endpoint_is_refused(endpoint):
    with pytest.raises(InvalidConfigValue, match="kvtier_events_replay_endpoint"):
        Endpoints(events="tcp://127.0.0.1:1", replay=endpoint).checked(
            allows_network=True, dp_rank=0
        )


def test_an_address_that_is_taken_is_an_error_that_says_so():
    endpoints = free_endpoints()
    outlet = Outlet(endpoints)
    try:
        with pytest.raises(InvalidConfigValue, match="cannot be served"):
            Outlet(endpoints)
    finally:
        outlet.close()
    Outlet(endpoints).close()
