"""Metrics of one attachment, beside SGLang's own on its /metrics: what the daemon cannot know.

The daemon counts what reaches it; a call that was answered out of shared memory, or not at all, is
seen here alone. With --enable-metrics SGLang collects what prometheus_client holds in the
scheduler's process; these are registered there once, whatever is attached or detached.

Belongs to the scheduler's thread.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kvtier_sglang.meters import Moved
from kvtier_sglang.states import StoreState

__all__ = ["EngineMetrics"]

_LABELS = ("tp_rank", "pp_rank", "dp_rank")


class EngineMetrics:
    """Without prometheus_client nothing is counted. `ranks` are the values of _LABELS."""

    def __init__(self, *, tp_rank: int, pp_rank: int, dp_rank: int) -> None:
        self._ranks = {
            "tp_rank": str(tp_rank), "pp_rank": str(pp_rank), "dp_rank": str(dp_rank),
        }  # fmt: skip
        self._made = _registered()

    def tell(
        self, got: Moved, put: Moved, state: StoreState, *, is_telling: bool | None = None
    ) -> None:
        """What was moved since the call before, and how it stands now. `is_telling` is that of the
        publisher of KV events, None where there is none.
        """
        if self._made is None:
            return
        for name, outcome, count in (
            ("get_pages", "hit", got.done),
            ("get_pages", "miss", got.asked - got.done),
            ("set_pages", "stored", put.done - put.already),
            ("set_pages", "already_there", put.already),
            ("set_pages", "not_stored", put.asked - put.done),
            ("calls", "get_late", got.late),
            ("calls", "get_in_time", got.calls - got.late),
            ("calls", "set_late", put.late),
            ("calls", "set_in_time", put.calls - put.late),
        ):
            if count:
                self._made[name].labels(outcome=outcome, **self._ranks).inc(count)
        self._made["serving"].labels(**self._ranks).set(state is StoreState.OPEN)
        if is_telling is not None:
            self._made["events"].labels(**self._ranks).set(is_telling)


@cache
def _registered() -> dict[str, Any] | None:
    """Of this process: a name can be registered once."""
    try:
        import prometheus_client
    except ImportError:
        return None
    with_outcome = ("outcome", *_LABELS)
    return {
        "get_pages": prometheus_client.Counter(
            "kvtier:get_pages_total", "Pages asked for, by outcome.", with_outcome
        ),
        "set_pages": prometheus_client.Counter(
            "kvtier:set_pages_total", "Pages to be stored, by outcome.", with_outcome
        ),
        "calls": prometheus_client.Counter(
            "kvtier:calls_total", "Calls, by whether they used up their deadline.", with_outcome
        ),
        "serving": prometheus_client.Gauge(
            "kvtier:serving",
            "1 while pages can be found, 0 while everything is a miss.",
            _LABELS,
            multiprocess_mode="livemostrecent",
        ),
        "events": prometheus_client.Gauge(
            "kvtier:events_telling",
            "1 while KV events tell all that is there, 0 while they are in doubt or have ended.",
            _LABELS,
            multiprocess_mode="livemostrecent",
        ),
    }
