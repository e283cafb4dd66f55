"""The verdict on a live run: within the tolerance, not, or none to be had."""

from __future__ import annotations

from collections import Counter

import pytest

from kvtier.bench.live import LiveRun
from kvtier.bench.live_report import live_document, plan_of
from kvtier.bench.replay import SimTier, WritePolicy, replay
from kvtier.core.page import Tier
from tests.bench.traces import build, conversations

RECORD = 4096 + 16384


def document(*, slots, lost=0, shift=0, counts_nvme=True, **fields):
    """Of a run that found what the simulator finds, but for the last `shift` requests."""
    trace = build(conversations(1))
    run = LiveRun(
        page_bytes=16384,
        capacities={tier: count * RECORD for tier, count in slots.items()},
        **{"pages_stored": 1000, "plane": "grpc", "wall_s": 5.0} | fields,
    )
    done = replay(trace, plan_of(run, "lru", WritePolicy.BACK))
    run.prefix = done.prefix.tolist()
    run.prefix[len(run.prefix) - shift :] = [0] * shift
    nvme = done.hits.get(SimTier.NVME)
    run.from_nvme = [0] * len(run.prefix) if nvme is None else nvme.tolist()
    run.from_nvme[len(run.prefix) - shift :] = [0] * shift
    if not counts_nvme:
        run.from_nvme = [0] * len(run.prefix)
    evicted = done.traffic[SimTier.NVME].evicted if Tier.NVME in slots else 0
    run.counters = Counter(evicted_last=evicted + lost)
    return live_document(trace, run, done)


HOST = {Tier.HOST: 60}
BOTH = {Tier.HOST: 60, Tier.NVME: 200}


def test_the_same_is_within_the_tolerance():
    for slots in (HOST, BOTH):
        found = document(slots=slots)
        assert found["simulated"]["pages"] == {t.name.lower(): n for t, n in slots.items()}
        assert found["difference_points"] == 0
        assert found["is_within_tolerance"] is True
        assert found["no_verdict"] == ""


@pytest.mark.parametrize("slots", [HOST, BOTH], ids=["host", "nvme"])
def test_another_hit_ratio_is_not(slots):
    found = document(slots=slots, shift=40)
    assert found["difference_points"] < -found["tolerance_points"]
    assert found["is_within_tolerance"] is False


def test_copies_that_nvme_could_not_take_are_a_reason_for_no_verdict():
    assert document(slots=BOTH, lost=10)["is_within_tolerance"] is True
    found = document(slots=BOTH, lost=11, shift=40)
    assert found["pages_lost_without_a_copy"] == 11
    assert found["is_within_tolerance"] is None
    assert found["no_verdict"].startswith("11 pages gave way before")
    # Without nvme what gives way is gone, in the simulator too.
    assert document(slots=HOST, lost=500)["is_within_tolerance"] is True


def test_a_short_run_over_shared_memory_has_no_verdict():
    found = document(slots=HOST, plane="shared memory", wall_s=49.0)
    assert found["is_within_tolerance"] is None
    assert "up to a second late" in found["no_verdict"]
    long = document(slots=HOST, plane="shared memory", wall_s=51.0)
    assert long["is_within_tolerance"] is True
    assert long["tolerance_points"] == 2.5


def test_each_tier_is_compared_in_tokens():
    found = document(slots=BOTH)
    for tier in found["tiers"].values():
        assert tier["difference_points"] == 0
        assert tier["hit_ratio"] > 0.05
    total = sum(tier["hit_ratio"] for tier in found["tiers"].values())
    assert found["hit_ratio"] == pytest.approx(total)
    # All that is found, but in the wrong tier.
    found = document(slots=BOTH, counts_nvme=False)
    assert found["difference_points"] == 0
    assert found["tiers"]["nvme"]["hit_ratio"] == 0
    assert found["is_within_tolerance"] is False


def test_a_run_of_no_requests_and_one_whose_losses_are_unknown_have_no_verdict():
    trace = build(conversations(1))
    run = LiveRun(page_bytes=16384, capacities={Tier.HOST: 60 * RECORD}, plane="grpc", ended="gone")
    plan = plan_of(run, "lru", WritePolicy.BACK)
    head = trace.head(0)
    found = live_document(head, run, replay(head, plan))
    assert (found["is_within_tolerance"], found["no_verdict"]) == (None, "no request was done")
    found = document(slots=BOTH, ended="gone")
    assert found["pages_lost_without_a_copy"] is None
    assert found["is_within_tolerance"] is None
    assert document(slots=HOST, ended="gone")["is_within_tolerance"] is True


def test_only_stored_pages_are_counted_as_put():
    found = document(slots=HOST, pages_stored=7, put_s=[0.5, 0.0])
    assert found["put"]["bytes"] == 7 * 16384
    assert found["put"]["gigabytes_per_s"] == 7 * 16384 / 1e9 / 0.5
