"""KV events as NVIDIA Dynamo's own indexer reads them: a real daemon, a real publisher, and
`python -m dynamo.indexer`, which decodes them in Rust and answers by its own hashes of the tokens.
"""

from __future__ import annotations

import time

import pytest
from dynamo_rig import NOTHING, Found, needs_dynamo
from event_rig import HOST, NVME, names_of, told
from pool_rig import PAGE, PAGES

from kvtier_sglang.events.wire import Medium
from tests.forks import daemon_of_its_own

pytestmark = needs_dynamo

TOKENS = PAGE * PAGES
ALL = Found(gpu=0, cpu=0, disk=TOKENS)


def tokens_of(number, pages=PAGES):
    """As `Told.prompt` makes them."""
    return [number * 1000 + token for token in range(pages * PAGE)]


@pytest.fixture
def daemon(forker, tmp_path):
    """Pages get to NVMe when they are told to."""
    (tmp_path / "nvme").mkdir(mode=0o700)
    settings = ("host.bytes=64MiB", "nvme.bytes=64MiB", f"nvme.paths={tmp_path}/nvme")
    with daemon_of_its_own(forker, *settings) as running:
        yield running


@pytest.fixture
def rig(daemon):
    with told(daemon.url) as made:
        yield made


def heard(rig, indexer, worker, number=0):
    """A publisher that the indexer listens to, and a prompt that it knows of."""
    made = rig.publish()
    indexer.register(worker, rig.endpoints, PAGE)
    keys = rig.prompt(number)
    indexer.comes_to(ALL, worker, tokens_of(number))
    return made, keys


def test_a_prompt_is_found_by_its_tokens(rig, indexer, worker):
    heard(rig, indexer, worker, 1)
    assert indexer.found(worker, tokens_of(2)) == NOTHING
    assert indexer.found(worker, tokens_of(1)[: 3 * PAGE]) == Found(0, 0, 3 * PAGE)
    assert indexer.found(worker, [*tokens_of(1)[: 2 * PAGE], *tokens_of(2)]) == Found(0, 0, 8)
    assert indexer.found(worker, tokens_of(1)[PAGE:]) == NOTHING, "its head is not there"


def test_what_was_told_before_it_came_is_asked_for(rig, indexer, worker):
    """With the first batch that it hears, of which one comes every five seconds."""
    rig.publish()
    router = rig.router()
    for number in range(3):
        rig.prompt(number, pages=2 * PAGES)
    router.listen(until=rig.agrees(router))
    indexer.register(worker, rig.endpoints, PAGE)
    for number in range(3):
        indexer.comes_to(Found(0, 0, 2 * TOKENS), worker, tokens_of(number, 2 * PAGES))


def test_a_page_that_goes_ends_the_prefix_until_it_is_back(rig, indexer, worker):
    _, keys = heard(rig, indexer, worker)
    rig.store._parts[1].namespace.delete(keys[3:4])
    indexer.comes_to(Found(0, 0, 3 * PAGE), worker, tokens_of(0))
    rig.prompt(0)
    indexer.comes_to(ALL, worker, tokens_of(0))
    rig.store.clear()
    indexer.comes_to(NOTHING, worker, tokens_of(0))


def test_what_it_missed_it_asks_for(rig, indexer, worker):
    """Its listener is off while a page goes and others come."""
    _, keys = heard(rig, indexer, worker)
    router = rig.router()
    router.listen(until=rig.agrees(router))
    indexer.misses_what_comes(worker)
    rig.store._parts[0].namespace.delete(keys[5:6])
    both = names_of([*keys, *rig.prompt(1)]) - names_of(keys[5:6])
    router.listen(until=lambda: router.believed[HOST] == both)
    indexer.listens_again(worker)
    rig.prompt(2)
    indexer.comes_to(Found(0, 0, 5 * PAGE), worker, tokens_of(0))
    indexer.comes_to(ALL, worker, tokens_of(1))


def test_a_publisher_that_ends_leaves_nothing_and_a_new_one_is_heard(rig, indexer, worker):
    made, _ = heard(rig, indexer, worker)
    made.close()
    indexer.comes_to(NOTHING, worker, tokens_of(0))
    rig.publish()
    rig.prompt(0)
    indexer.comes_to(ALL, worker, tokens_of(0))


def test_who_hears_nothing_but_the_end_hears_the_next_publisher(rig, indexer, worker):
    """It asks at its first message, waits for the answer without end, and hears nothing else until
    it comes.
    """
    made = rig.publish()
    rig.prompt(0)
    router = rig.router()
    router.listen(until=rig.agrees(router))
    indexer.register(worker, rig.endpoints, PAGE)
    time.sleep(0.5)  # it subscribes; nobody says when
    made.close()
    rig.publish()
    rig.prompt(0)
    indexer.comes_to(ALL, worker, tokens_of(0))


@pytest.mark.parametrize(
    ("host", "seen"),
    [
        (Medium.EXTERNAL, Found(0, 0, TOKENS // 2)),
        (Medium.CPU_PINNED, Found(0, TOKENS // 2, TOKENS)),
    ],
    ids=["EXTERNAL", "CPU_PINNED"],
)
def test_heads_in_host_memory_and_tails_on_nvme(rig, daemon, indexer, worker, host, seen):
    """Of CPU_PINNED, DISK and EXTERNAL, in this order, it goes on where the one before ended, and
    never back: what lies behind EXTERNAL on DISK is not seen.
    """
    half = PAGES // 2
    rig.publish(host=host)
    router = rig.router()
    keys = rig.prompt(0)
    for part in rig.store._parts:
        part.namespace.demote(keys[half:])
    router.listen(until=lambda: router.believed[NVME] == names_of(keys[half:]))
    daemon.kill()
    router.listen(until=lambda: not any(router.believed.values()))
    daemon.start()
    router.listen(until=lambda: router.believed[NVME] == names_of(keys[half:]))
    rig.prompt(0)
    router.listen(until=lambda: names_of(keys[:half]) <= router.believed[host.value])
    assert rig.found() == {HOST: names_of(keys[:half]), NVME: names_of(keys[half:])}
    indexer.register(worker, rig.endpoints, PAGE)
    indexer.comes_to(seen, worker, tokens_of(0))


def test_nothing_of_it_is_a_riddle_to_the_indexer(rig, indexer, worker):
    """After all that the tests before told it: it warns of gaps, which it has to see, and that an
    answer does not begin at zero: with AllBlocksCleared it begins at what holds.
    """
    heard(rig, indexer, worker)
    assert indexer.complaints() == {"Gap detected", "Replay incomplete"}
