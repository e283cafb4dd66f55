"""Routers: where requests go, what they find there, how long they wait."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.bench.replay import ReplayPlan, SimTier, replay
from kvtier.bench.routing import Fleet, Router, route
from kvtier.bench.trace import TraceBuilder
from tests.bench.traces import BLOCK, build, conversations

SEEDS = (1, 2)
RATE = 1000.0


def fleet(router, **changed):
    return Fleet(**{"router": router, "replicas": 4, "local": 60, "rate": RATE} | changed)


@pytest.mark.parametrize("router", Router)
@pytest.mark.parametrize("seed", SEEDS)
def test_one_replica_is_one_cache_whatever_the_router(seed, router):
    trace = build(conversations(seed), remainder=5)
    done = route(trace, fleet(router, replicas=1))
    alone = replay(trace, ReplayPlan(slots={SimTier.GPU: 60}))
    assert done.local.tolist() == alone.prefix.tolist()
    assert not done.shared.any()
    missed = trace.input_tokens - trace.tokens(alone.prefix)
    assert done.service_s.tolist() == pytest.approx((missed / RATE).tolist())
    assert done.imbalance() == done.imbalance_windowed(trace) == pytest.approx(1.0)


@pytest.mark.parametrize("router", Router)
def test_tokens_without_a_block_are_computed_every_time(router):
    builder = TraceBuilder("generated", BLOCK)
    for number in range(2):
        builder.add(
            builder.blocks.follow([1, 2]),
            arrival_s=100.0 * number,
            session=0,
            input_tokens=3 * BLOCK,
            output_tokens=1,
        )
    done = route(builder.build(), fleet(router, replicas=1))
    assert done.service_s.tolist() == pytest.approx([3 * BLOCK / RATE, BLOCK / RATE])


def test_first_tokens_wait_their_turn():
    # One replica, requests at 0, 1 and 2 s, of 2, 2 and 0 s of service.
    blocks = int(2 * RATE) // BLOCK
    requests = [(0, list(range(blocks))), (1, list(range(1000, 1000 + blocks)))]
    trace = build([*requests, requests[0]])
    done = route(trace, fleet(Router.RR, replicas=1, local=1000))
    service = blocks * BLOCK / RATE
    assert done.first_token_s.tolist() == pytest.approx([service, 2 * service - 1, 2 * service - 2])


@pytest.mark.parametrize("seed", SEEDS)
def test_in_turn(seed):
    trace = build(conversations(seed))
    assert route(trace, fleet(Router.RR)).replica.tolist() == [
        request % 4 for request in range(trace.requests)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_sessions_stay(seed):
    trace = build(conversations(seed, sessions=40))
    done = route(trace, fleet(Router.SESSION))
    homes = {(int(s), int(r)) for s, r in zip(trace.session, done.replica, strict=True)}
    assert len(homes) == trace.sessions
    assert len({replica for _, replica in homes}) == 4


def test_who_sends_no_id_goes_in_turn():
    trace = build(conversations(3, sessions=60, requests=600))
    none = route(trace, fleet(Router.SESSION, adoption=0.0))
    assert none.replica.tolist() == route(trace, fleet(Router.RR)).replica.tolist()
    half = route(trace, fleet(Router.SESSION, adoption=0.5))
    staying = 0
    for session in range(trace.sessions):
        staying += len(set(half.replica[trace.session == session].tolist())) == 1
    assert 15 <= staying <= 45


def test_a_bounded_session_leaves_a_replica_that_is_overloaded():
    long = [(session, [1000 * session + i for i in range(400)]) for session in range(3)]
    requests = [(9, [1]), *long, (9, [1, 2])]
    trace = build(requests)
    at_home = route(trace, fleet(Router.SESSION_BOUNDED, replicas=2, bound_s=1e9))
    assert at_home.replica[0] == at_home.replica[-1]
    bounded = route(trace, fleet(Router.SESSION_BOUNDED, replicas=2, bound=1.0, bound_s=0.0))
    waiting = np.bincount(bounded.replica[:-1], bounded.service_s[:-1], 2)
    assert bounded.replica[-1] == waiting.argmin()


def test_the_longest_prefix_wins_and_a_kv_router_weighs_it_with_the_load():
    head = list(range(50))
    requests = [(0, head)] + [(n, [*head, 1000 + n]) for n in range(1, 30)]
    trace = build(requests)
    prefix = route(trace, fleet(Router.PREFIX, local=1000))
    assert len(set(prefix.replica.tolist())) == 1
    # At a tenth of the speed the work that waits is soon more than the head costs.
    kv = route(trace, fleet(Router.KV, local=1000, rate=10.0))
    assert len(set(kv.replica.tolist())) == 4
    assert kv.imbalance() < prefix.imbalance() == pytest.approx(4.0)


def test_a_prefix_that_nobody_has_goes_to_the_first_of_the_least_loaded():
    # Long after each other, so that all replicas are idle; then two at once.
    requests = [(n, [1000 * n + i for i in range(200)]) for n in range(6)]
    builder = TraceBuilder("generated", BLOCK)
    for number, (session, ids) in enumerate(requests):
        arrival = 100.0 * number if number < 4 else 1000.0
        builder.add(
            builder.blocks.follow(ids),
            arrival_s=arrival,
            session=session,
            input_tokens=len(ids) * BLOCK,
            output_tokens=1,
        )
    done = route(builder.build(), fleet(Router.PREFIX, local=10_000))
    assert done.replica.tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("router", Router)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_shared_tier_makes_the_router_irrelevant_to_the_hit_ratio(seed, router):
    trace = build(conversations(seed))
    done = route(trace, fleet(router, shared=10_000))
    assert (done.local + done.shared).tolist() == replay(
        trace, ReplayPlan(slots={SimTier.HOST: 10_000})
    ).prefix.tolist()
