"""Kind 41, EVENTS: whatever is lost between the daemon and a router, the router ends with what the
daemon holds; and it never goes on believing in pages that are gone.
"""

from __future__ import annotations

import pytest

from tests.sglang.event_rig import HOST, NVME, names_of, told

#: Room for some prompts; what is more is evicted.
SETTINGS = ("host.bytes=2MiB", "nvme.bytes=64MiB", "nvme.write_policy=through")


@pytest.fixture
def rig(make_daemon):
    daemon = make_daemon(*SETTINGS).start()
    with told(daemon.url) as made:
        made.daemon = daemon
        yield made


def test_three_of_a_hundred_lost_and_the_publisher_started_anew(rig):
    """The router sees the gaps and asks; after a restart it sees a gap, too, and starts over."""
    publisher = rig.publish()
    router = rig.router(loses={2, 5, 11}.__contains__)
    keys = rig.prompt(0)
    router.listen(until=lambda: names_of(keys) <= router.believed[HOST])
    for number in range(1, 25):
        rig.prompt(number)
        before = router.received
        router.listen(until=lambda before=before: router.received > before)
    router.listen(until=rig.agrees(router))
    assert router.lost == 3
    assert router.questions >= 4, "at first, and after each loss"
    publisher.close()
    rig.publish()
    # The new one has heard no tokens: of what it cannot vouch for nothing is left.
    router.listen(until=lambda: not any(router.believed.values()))
    for number in range(25):
        rig.prompt(number)
    router.listen(until=rig.agrees(router))


def test_leaving_one_tier_is_not_leaving_all(rig):
    rig.publish()
    router = rig.router()
    first = names_of(rig.prompt(0))
    router.listen(until=lambda: first <= router.believed[HOST] and first <= router.believed[NVME])
    number = 0
    while first & rig.found()[HOST]:
        number += 1
        rig.prompt(number)
    router.listen(until=rig.agrees(router))
    assert first.isdisjoint(router.believed[HOST])
    assert first <= router.believed[NVME]


def test_a_daemon_that_is_killed_leaves_nothing_to_believe_in(rig):
    """Until it is back: then what it found on NVMe is told again, and nothing else."""
    rig.publish()
    router = rig.router()
    keys = names_of(rig.prompt(0))
    router.listen(until=lambda: keys <= router.believed[NVME])
    rig.daemon.kill()
    router.listen(until=lambda: not any(router.believed.values()))
    rig.daemon.start()
    router.listen(until=lambda: router.believed[NVME] == keys)
    assert not router.believed[HOST]


@pytest.mark.parametrize("way", ["bump", "delete", "clear", "page"])
def test_what_is_ended_is_told(rig, way):
    rig.publish()
    router = rig.router()
    keys = rig.prompt(0)
    names = names_of(keys)
    router.listen(until=lambda: names <= router.believed[HOST] & router.believed[NVME])
    part = rig.store._parts[1].namespace
    if way == "page":
        part.delete(keys[3:4])
        names = names_of(keys[3:4])
    elif way == "clear":
        rig.store.clear()
    elif way == "delete":
        rig.connection.delete_namespace(part.layout)
    else:
        part.bump()
    router.listen(until=lambda: names.isdisjoint(router.believed[HOST] | router.believed[NVME]))
    if way == "page":
        assert router.believed[HOST] == names_of(keys) - names


def test_a_watcher_that_fell_behind_says_the_difference(make_daemon):
    """Every turn more changes than the daemon keeps: what was told in between does not matter."""
    daemon = make_daemon(*SETTINGS, "limits.watch_events_max=16").start()
    with told(daemon.url) as rig:
        rig.publish()
        router = rig.router()
        for number in range(30):
            rig.prompt(number)
        for part in rig.store._parts:
            part.namespace.delete(rig.keys[::3])
        router.listen(until=rig.agrees(router))
