"""KV events over real sockets, of a real daemon."""

from __future__ import annotations

import logging
import signal
import threading
import time

import pytest
from event_rig import HOST, NVME, names_of, told
from pool_rig import PAGES, hashes, pool_with_heads, store_for

import kvtier
from kvtier.core.page import Tier
from kvtier_sglang.events.publisher import Waits
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
    rig.publishers[0]._mirror = None
    router.listen(until=lambda: not router.believed)
    assert "publishing KV events failed" in caplog.text
    caplog.clear()  # with the traceback, which holds the connection
    # It begins anew, knows of no tokens, and learns of them as they come.
    keys = rig.prompt(1)

    def is_back():
        rig.prompt(1)
        return router.believed[HOST] == names_of(keys)

    router.listen(until=is_back)


def test_who_asks_is_answered_also_when_there_is_nothing_to_tell(rig, caplog):
    """Dynamo's indexer waits for an answer without end, and hears nothing else meanwhile."""
    made = rig.publish(Waits(restart=60.0))
    router = rig.router()
    rig.prompt(0)
    router.listen(until=rig.agrees(router))
    made._mirror = None
    router.listen(until=lambda: not router.believed)
    assert "publishing KV events failed" in caplog.text
    caplog.clear()  # with the traceback, which holds the connection
    late = rig.router()
    late.listen(until=lambda: late.questions == 1)
    assert not late.believed


def test_who_misses_something_at_the_end_is_answered(rig):
    """It sees the gap by the last that is told."""
    made = rig.publish()
    losing = []
    router, witness = rig.router(loses=lambda _count: bool(losing)), rig.router()
    rig.prompt(0)
    for each in (router, witness):
        each.listen(until=rig.agrees(each))
    losing.append(True)
    before = witness.received
    rig.prompt(1)
    witness.listen(until=rig.agrees(witness))
    router.listen(until=lambda: router.lost >= witness.received - before)
    losing.clear()
    closing = threading.Thread(target=made.close)
    closing.start()
    try:
        router.listen(until=lambda: not router.believed[HOST])
    finally:
        closing.join()
    assert router.questions == 2


def test_a_watch_that_fails_is_begun_again(rig, caplog):
    made = rig.publish()
    router = rig.router()
    rig.prompt(0)
    router.listen(until=rig.agrees(router))
    reads, failed = made._read, []

    async def fails_once(*args):
        if len(failed) < 2:  # one for each part
            failed.append(args)
            raise RuntimeError("of a kind that nobody thought of")
        await reads(*args)

    made._read = fails_once
    rig.store.pause()
    router.listen(until=lambda: not router.believed[HOST])
    assert not made.is_telling
    rig.store.resume("r1")
    router.listen(until=rig.agrees(router))
    router.listen(until=lambda: made.is_telling)
    assert len(failed) == 2
    assert "watching for KV events failed" in caplog.text


def test_of_a_stopped_daemon_nothing_is_believed(rig, daemon):
    """Its connection stays open, and shows for most of a minute that nothing is wrong."""
    made = rig.publish(Waits(silence=0.5, grace=0.5, retry=0.1))
    router = rig.router()
    rig.prompt(0)
    router.listen(until=rig.agrees(router))
    daemon.signal(signal.SIGSTOP)
    try:
        router.listen(until=lambda: not router.believed[HOST], seconds=15)
        assert not made.is_telling
    finally:
        daemon.signal(signal.SIGCONT)
    router.listen(until=rig.agrees(router))


def test_a_bad_chain_costs_itself_alone(rig, caplog):
    rig.publish()
    router = rig.router()
    rig.chains.tell([1, 2, 3, 4], ["no hash"], None)
    rig.chains.tell([1, 2, 3, 4], [None], None)
    rig.prompt(0)
    router.listen(until=rig.agrees(router))
    assert router.believed[HOST] == names_of(rig.keys)
    assert "publishing KV events failed" not in caplog.text


def test_several_who_ask_are_answered_with_what_was_made_once(rig):
    made = rig.publish()
    early = rig.router()
    rig.prompt(0)
    early.listen(until=rig.agrees(early))
    all_of, calls = made._mirror.all, []
    made._mirror.all = lambda: calls.append(1) or all_of()
    rig.prompt(1)
    early.listen(until=rig.agrees(early))
    routers = [rig.router() for _ in range(4)]
    for router in routers:
        router.listen(until=lambda router=router: router.believed[HOST] == early.believed[HOST])
    assert len(calls) == 1
    rig.prompt(2)
    early.listen(until=rig.agrees(early))
    late = rig.router()
    late.listen(until=lambda: late.believed[HOST] == early.believed[HOST])
    assert len(calls) == 2, "more was told since"


def test_a_publisher_that_falls_behind_ends_where_the_others_do(forker, caplog):
    caplog.set_level(logging.DEBUG, "kvtier_sglang.events.publisher")
    with (
        daemon_of_its_own(forker, "host.bytes=64MiB", "limits.watch_events_max=16") as running,
        told(running.url) as rig,
    ):
        rig.publish()
        router = rig.router()
        router.listen(until=lambda: rig.publishers[0].is_telling)
        ends, number = time.monotonic() + 30, 0
        while "fell behind" not in caplog.text:
            assert time.monotonic() < ends
            rig.prompt(number, pages=4 * PAGES)
            number += 1
        router.listen(until=rig.agrees(router))
        assert router.believed[HOST] == names_of(rig.keys)


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
