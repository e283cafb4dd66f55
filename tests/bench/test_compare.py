"""Two results beside each other, and files that are none."""

from __future__ import annotations

import json

import pytest

from kvtier.bench.capacity import Sizes
from kvtier.bench.compare import compare, load_result
from kvtier.bench.errors import BenchInput
from kvtier.bench.figures import Basis, result, summary
from kvtier.bench.replay import ReplayPlan, SimTier, WritePolicy, replay
from kvtier.bench.report import document
from kvtier.bench.routing import Fleet, Router, route
from kvtier.bench.routing_report import routed
from tests.bench.traces import build, conversations

#: Of a fleet whose rate and cost nobody has set.
AS_SET = "rate 8000.0, shared cost 0.05"
SETUP = {"one_pass": False, "model": None}


def report(*plans, seed=1, setup=SETUP):
    """As read back from a file."""
    trace = build(conversations(seed))
    basis, sizes = Basis(trace), Sizes(trace, None)
    rows = [
        routed(basis, route(trace, plan))
        if isinstance(plan, Fleet)
        else result(basis, sizes, replay(trace, plan))
        for plan in plans
    ]
    return json.loads(json.dumps(document(summary(basis, sizes), setup, rows)))


def host(slots, policy="lru", **more):
    return ReplayPlan(slots={SimTier.HOST: slots}, policy=policy, **more)


def test_rows_of_the_same_thing_are_paired_wherever_they_stand():
    a, b = report(host(40), host(90)), report(host(90), host(200), host(40))
    found = compare(a, b)
    assert [pair.name for pair in found.pairs] == ["lru, host=640tok", "lru, host=1.44Ktok"]
    assert all(set(pair.points.values()) == {0.0} for pair in found.pairs)
    assert (found.only_a, found.only_b) == ([], ["lru, host=3.2Ktok"])
    assert found.differs == []


def test_policies_of_one_size_are_paired_and_differ_in_points():
    a, b = report(host(40)), report(host(40, policy="arc"))
    (pair,) = compare(a, b).pairs
    assert pair.name == "lru, host=640tok | arc, host=640tok"
    one, two = (doc["results"][0] for doc in (a, b))
    assert pair.points["cold"] == pytest.approx(
        100 * (two["hit_ratio"]["cold"] - one["hit_ratio"]["cold"])
    )
    assert pair.points["host"] == pytest.approx(pair.points["cold"])
    assert pair.points["optimum"] == 0
    assert pair.points["cold"] != 0


def test_a_write_policy_is_part_of_what_was_replayed():
    slots = {SimTier.HOST: 40, SimTier.NVME: 90}
    plans = [ReplayPlan(slots=slots, write=write) for write in WritePolicy]
    found = compare(report(*plans), report(plans[2], plans[0]))
    size = "host=640tok nvme=1.44Ktok"
    assert [pair.name for pair in found.pairs] == [f"lru, back, {size}", f"lru, selective, {size}"]
    assert found.only_a == [f"lru, through, {size}"]


def test_routers():
    fleets = [
        Fleet(router=router, replicas=4, local=60, shared=shared)
        for router in (Router.RR, Router.SESSION)
        for shared in (0, 90)
    ]
    found = compare(report(*fleets[:3]), report(*fleets[1:]))
    assert [pair.name for pair in found.pairs] == [
        f"rr, lru, 4 x 960tok + 1.44Ktok, {AS_SET}",
        f"session (100 % send ids), lru, 4 x 960tok, {AS_SET}",
    ]
    assert found.only_a == [f"rr, lru, 4 x 960tok, {AS_SET}"]


def test_a_rate_and_a_cost_of_shared_pages_are_part_of_what_was_replayed():
    made = [{}, {"rate": 50.0}, {"shared_cost": 0.5}, {"adoption": 0.996}]
    fleets = [
        Fleet(router=Router.SESSION, replicas=3, local=60, shared=90, **more) for more in made
    ]
    a, b = report(*fleets), report(*reversed(fleets))
    found = compare(a, b)
    assert len({pair.name for pair in found.pairs}) == 4
    assert all(pair.name_a == pair.name_b for pair in found.pairs)
    (pair,) = compare(report(fleets[0]), report(fleets[1])).pairs
    assert pair.name_a != pair.name_b


def test_sizes_that_agree_in_four_digits_are_two_sizes():
    a = report(host(40), host(90))
    for row, tokens in zip(a["results"], (1_000_000, 1_000_400), strict=True):
        row["tiers"]["host"]["capacity_tokens"] = tokens
    b = a | {"results": a["results"][::-1]}
    found = compare(a, b)
    assert [pair.name for pair in found.pairs] == ["lru, host=1Mtok", "lru, host=1000400tok"]
    assert all(set(pair.points.values()) == {0.0} for pair in found.pairs)
    other = compare(a | {"results": a["results"][:1]}, a | {"results": a["results"][1:]})
    assert other.pairs == []


def test_what_is_not_the_same_trace_or_setup_is_named():
    a = report(host(40))
    b = report(host(40), seed=2, setup={**SETUP, "model": "kimi-k2"})
    differs = {what: (one, other) for what, one, other in compare(a, b).differs}
    assert differs["setup model"] == ("null", '"kimi-k2"')
    assert differs["trace input_tokens"] == tuple(
        str(doc["trace"]["input_tokens"]) for doc in (a, b)
    )
    assert "trace block_tokens" not in differs


def changed(name, value):
    return json.dumps(report(host(40)) | {name: value})


def with_ratio(text):
    found = report(host(40))
    found["results"][0]["same_session"] = "HERE"
    return json.dumps(found).replace('"HERE"', text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (lambda: "", "no JSON document"),
        (lambda: "[" * 100_000, "no JSON document"),
        (lambda: "[1]", "no result of kvtier bench hit-ratio"),
        (lambda: '{"a": 1}\n{"a": 2}', "no JSON document"),
        (lambda: changed("kvtier_bench", "compare"), "no result of kvtier bench hit-ratio"),
        (lambda: changed("format", 2), "a result of format 2; this version reads 1"),
        (lambda: changed("format", None), "a result of format None; this version reads 1"),
        (lambda: changed("results", [{}]), "a damaged result (KeyError: 'hit_ratio')"),
        (lambda: changed("results", 7), "a damaged result (TypeError"),
        (lambda: with_ratio("1" + "0" * 400), "a damaged result (OverflowError"),
        (lambda: with_ratio("NaN"), "a damaged result (ValueError: nan is no ratio)"),
        (lambda: with_ratio("1.5"), "a damaged result (ValueError: 1.5 is no ratio)"),
        (lambda: changed("trace", []), "a damaged result (AttributeError"),
    ],
)
def test_what_is_no_result_is_refused_by_name(tmp_path, text, what):
    path = tmp_path / "some.json"
    path.write_text(text())
    with pytest.raises(BenchInput) as caught:
        load_result(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert what in str(caught.value)
