"""Policies in a store: conversations that go on while others pass through once."""

from __future__ import annotations

from functools import partial

import pytest

from kvtier.core.handles import Reading
from kvtier.core.page import Tier
from kvtier.core.policy import POLICIES
from kvtier.core.store import Store
from tests.core.support import NS, demote, keys, make_store, meta, present, put


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    """`make_store` with policies, by name for all tiers or for each."""

    def make_with(policy: str | dict[Tier, str], slots: int, **more: int) -> Store:
        if isinstance(policy, str):
            chosen = POLICIES[policy]
        else:
            chosen = {tier: POLICIES[name] for tier, name in policy.items()}
        monkeypatch.setattr("tests.core.support.Store", partial(Store, make_policy=chosen))
        return make_store(slots=slots, **more)

    return make_with


def request(store: Store, pages: list[int], *, shards: int = 1) -> int:
    """Reads the pages that are there, up to the first that is not, and stores the rest; how many
    were read."""
    found = present(store, pages)
    read = next((i for i, page in enumerate(pages) if page not in found), len(pages))
    for shard in range(shards):
        for outcome in store.acquire(NS, shard, keys(pages[:read])) if read else []:
            if isinstance(outcome, Reading):
                outcome.release()
    for i in range(read, len(pages)):
        for shard in range(shards):
            put(store, pages[i], pages[i - 1] if i else None, shard=shard)
    return read


def pages_read(store: Store, *, shards: int = 1) -> int:
    """Three conversations of ten pages take turns; beside each turn a prompt of twenty-four pages
    is seen once."""
    read = 0
    once = 1000
    for turn in range(60):
        if turn >= 6:
            request(store, list(range(once, once + 24)), shards=shards)
            once += 24
        talk = 100 * (turn % 3)
        read += request(store, list(range(talk, talk + 10)), shards=shards)
    store.survey.check()
    return read


def test_conversations_outlive_prompts_that_are_seen_once(make) -> None:
    read = {name: pages_read(make(name, slots=64)) for name in POLICIES}
    assert read["lru"] <= 40, "no more than before the prompts begin"
    assert read["arc"] > 500
    assert read["s3-fifo"] > 500


@pytest.mark.parametrize("name", ["arc", "s3-fifo"])
def test_it_holds_for_pages_of_several_shards(make, name: str) -> None:
    assert pages_read(make(name, slots=128, shard_count=2), shards=2) > 500


@pytest.mark.parametrize("nvme", POLICIES)
@pytest.mark.parametrize("host", POLICIES)
def test_each_tier_has_a_policy_of_its_own(make, host: str, nvme: str) -> None:
    store = make({Tier.HOST: host, Tier.NVME: nvme}, slots=6, nvme_slots=12)
    for n in range(40):
        parent = n - 1 if n % 4 else None
        put(store, n, parent)
        demote(store, n, parent)
        for outcome in store.acquire(NS, 0, keys(range(n + 1))):
            if isinstance(outcome, Reading):
                outcome.release()
        store.survey.check()
    status = store.status()
    assert (status[Tier.HOST].sealed, status[Tier.NVME].sealed) == (6, 12)
    for n in present(store, range(40)):
        assert n % 4 == 0 or present(store, [n - 1]) == [n - 1], "a page without its parent"


@pytest.mark.parametrize("name", POLICIES)
def test_a_put_that_dies_after_it_made_room_leaves_the_room(make, name: str) -> None:
    store = make(name, slots=10)
    for n in range(10):
        put(store, n)
    for n in range(100, 130):
        filling = store.reserve(NS, 0, meta(n), 8192)
        filling.abandon()
    assert len(present(store, range(10))) == 9
    for n in range(200, 220):
        put(store, n)
    assert store.status()[Tier.HOST].sealed == 10
    store.survey.check()
