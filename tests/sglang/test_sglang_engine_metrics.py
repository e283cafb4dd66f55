"""What is counted on the engine's side, as its /metrics shows it."""

from __future__ import annotations

from prometheus_client import REGISTRY

from kvtier_sglang.engine_metrics import EngineMetrics
from kvtier_sglang.meters import Moved
from kvtier_sglang.states import StoreState

RANKS = {"tp_rank": "3", "pp_rank": "1", "dp_rank": "2"}


def sample(name, **labels):
    return REGISTRY.get_sample_value(f"kvtier:{name}", labels | RANKS) or 0.0


def test_pages_and_calls_by_outcome():
    metrics = EngineMetrics(tp_rank=3, pp_rank=1, dp_rank=2)
    got = Moved(asked=10, done=7, calls=3, late=1)
    put = Moved(asked=9, done=8, already=2, calls=2)
    metrics.tell(got, put, StoreState.OPEN)
    assert sample("serving") == 1
    assert sample("events_telling") == 0
    metrics.tell(Moved(), Moved(), StoreState.OPEN, is_telling=True)
    assert sample("events_telling") == 1
    metrics.tell(Moved(), Moved(), StoreState.OPEN, is_telling=False)
    assert sample("events_telling") == 0
    metrics.tell(got, Moved(), StoreState.PAUSED)
    # Attached anew: the same counters go on.
    EngineMetrics(tp_rank=3, pp_rank=1, dp_rank=2).tell(Moved(), Moved(), StoreState.REFUSED)
    assert sample("serving") == 0
    assert {
        (name, outcome): sample(name, outcome=outcome)
        for name, outcome in (
            ("get_pages_total", "hit"),
            ("get_pages_total", "miss"),
            ("set_pages_total", "stored"),
            ("set_pages_total", "already_there"),
            ("set_pages_total", "not_stored"),
            ("calls_total", "get_late"),
            ("calls_total", "get_in_time"),
            ("calls_total", "set_late"),
            ("calls_total", "set_in_time"),
        )
    } == {
        ("get_pages_total", "hit"): 14,
        ("get_pages_total", "miss"): 6,
        ("set_pages_total", "stored"): 6,
        ("set_pages_total", "already_there"): 2,
        ("set_pages_total", "not_stored"): 1,
        ("calls_total", "get_late"): 2,
        ("calls_total", "get_in_time"): 4,
        ("calls_total", "set_late"): 0,
        ("calls_total", "set_in_time"): 2,
    }
