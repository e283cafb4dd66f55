"""What a client says of a conversation's return: with get and put, and never at their cost."""

from __future__ import annotations

import asyncio
import time

import pytest

import kvtier
from kvtier.client.arguments import GetArguments, PutArguments
from tests.client.fake_tiers import REMEDY
from tests.client.local_rig import NBYTES, attached, opaque, pages_of, separate_keys
from tests.forks import ForkedDaemon

ENDED, IN_TWO = {"session_end": True}, {"expected_return": 1.9995}


@pytest.mark.parametrize(("hint", "said"), [(ENDED, (True, 0)), (IN_TWO, (False, 2000))])
def test_a_put_says_it_of_its_last_page(daemon, ns, make_pages, hint, said):
    keys = ns.keys(range(16))
    ns.put(keys, make_pages(4), **hint)
    assert daemon.tiers.expected == [(keys[3], *said)]


def test_a_get_says_it_of_the_last_page_of_the_prefix(daemon, ns, make_pages):
    keys = ns.keys(range(16))
    ns.put(keys[:3], make_pages(3))
    got = ns.get(keys, expected_return=0)
    assert (got.prefix, daemon.tiers.expected) == (3, [(keys[2], False, 0)])
    ns.get(ns.keys([7] * 4), session_end=True)
    assert len(daemon.tiers.expected) == 1, "nothing was there to speak of"


def test_who_says_nothing_makes_no_call(daemon, ns, make_pages):
    keys = ns.keys(range(16))
    ns.put(keys, make_pages(4), session="s", expected_return=None)
    ns.get(keys, session_end=False)
    assert daemon.tiers.expected == []


@pytest.mark.parametrize("error", [kvtier.NotImplementedYet, kvtier.LimitExceeded, kvtier.Busy])
def test_a_hint_that_fails_changes_no_outcome(daemon, ns, make_pages, error):
    daemon.tiers.expect_error = error("no", remedy=REMEDY)
    keys = ns.keys(range(16))
    assert ns.put(keys, make_pages(4), session_end=True).stored == 4
    assert ns.get(keys, session_end=True).prefix == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"session_end": 1},
        {"expected_return": -1.0},
        {"expected_return": "soon"},
        {"session_end": True, "expected_return": 3.0},
    ],
    ids=["number", "past", "text", "both"],
)
def test_what_makes_no_sense_is_refused_before_anything_is_sent(daemon, ns, make_pages, wrong):
    with pytest.raises(kvtier.LimitExceeded, match=r"session_end|expected_return"):
        ns.put(ns.keys(range(4)), make_pages(1), **wrong)
    assert ns.lookup(ns.keys(range(4))).prefix == 0


def test_get_and_put_take_the_same_words():
    assert {"session_end", "expected_return"} < set(GetArguments.__annotations__)
    assert {"session_end", "expected_return"} < set(PutArguments.__annotations__)


def test_asyncio_says_it_too(daemon, layout, make_pages):
    async def main():
        async with kvtier.aio.connect(daemon.url, deadline=5.0) as kv:
            ns = await kv.namespace(layout)
            await ns.put(ns.keys(range(4)), make_pages(1), session_end=True)

    asyncio.run(main())
    assert len(daemon.tiers.expected) == 1


def test_a_page_past_its_ttl_is_there_until_room_is_needed_and_then_the_first_to_go(
    forker, tmp_path
):
    """Put by either plane, after a page that would have been the first."""
    with (
        ForkedDaemon(forker, tmp_path, "host.bytes=8MiB") as process,
        kvtier.connect(process.url, deadline=20, plane="grpc") as far,
        kvtier.connect(process.url, deadline=20) as near,
    ):
        ns, other = near.namespace(opaque(NBYTES)), far.namespace(opaque(NBYTES))
        attached(near)
        old, *brief = keys = separate_keys(ns, 0, 3)
        pages = pages_of(keys, NBYTES)
        ns.put([old], pages[:1]).raise_for_refused()
        for put, at in ((ns.put, 1), (other.put, 2)):
            put(keys[at : at + 1], pages[at : at + 1], ttl=0.2).raise_for_refused()
        assert near.local.puts.stored == 2
        time.sleep(1.5)
        assert ns.lookup(brief[:1]).prefix == ns.lookup(brief[1:]).prefix == 1
        for number in range(100, 250):
            ns.put(filler := separate_keys(ns, number, 1), pages_of(filler, NBYTES))
            if not any(ns.lookup([key]).prefix for key in brief):
                break
        assert [ns.lookup([key]).prefix for key in keys] == [1, 0, 0]
