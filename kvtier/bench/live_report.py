"""A live run beside the simulator's replay of the same requests, as a document. Pure functions.

Over gRPC the daemon hears of each use before the next request, as the simulator does. What remains,
in points of the hit ratio: slabs lose their tails, requests longer than a call's window are served
in several calls, and with nvme the cleaner copies ahead and its queue may drop a copy. Over shared
memory uses reach the daemon up to a second late, and 2 % of the memory is granted ahead for puts;
a run in which a second is much has no verdict.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtier.bench.live import LiveRun
from kvtier.bench.replay import ReplayPlan, SimTier, WritePolicy
from kvtier.bench.trace import Trace
from kvtier.core.page import Tier

__all__ = ["FORMAT", "head_of", "live_document", "plan_of"]

FORMAT: Final = 1
#: Points, with host memory alone and with nvme below it.
TOLERANCE: Final = {False: 0.5, True: 3.0}
#: Points more over shared memory, and how many seconds a run must last to be compared.
TOLERANCE_SHARED: Final = 2.0
SHARED_LASTS_S: Final = 50.0
_HEADER_BYTES: Final = 4096
_SLAB_BYTES: Final = 64 << 20


def plan_of(run: LiveRun, policy: str, write: WritePolicy) -> ReplayPlan:
    """The simulator's configuration of the daemon that the run was against."""
    record = _HEADER_BYTES + -(-run.page_bytes // _HEADER_BYTES) * _HEADER_BYTES
    names = {Tier.HOST: SimTier.HOST, Tier.NVME: SimTier.NVME}
    slots = {}
    for tier, name in names.items():
        capacity = run.capacities.get(tier, 0)
        if capacity:
            slabs = max(1, capacity // _SLAB_BYTES)
            slots[name] = slabs * (capacity // slabs // record)
    return ReplayPlan(slots=slots, policy=policy, write=write)


def head_of(trace: Trace, requests: int) -> Trace:
    """The first so many requests."""
    columns = ("arrival_s", "session", "leaf", "blocks", "input_tokens", "output_tokens",
               "known_tokens")  # fmt: skip
    return replace(trace, **{name: getattr(trace, name)[:requests] for name in columns})


def live_document(
    trace: Trace, run: LiveRun, simulated: npt.NDArray[np.int32], plan: ReplayPlan
) -> dict[str, Any]:
    """`trace`: the requests that were done; `simulated`: their leading hits in the simulator."""
    found = np.array(run.prefix, np.int32)
    total = max(1, int(trace.input_tokens.sum()))
    live, replayed = (float(trace.tokens(one).sum() / total) for one in (found, simulated))
    difference = 100 * (live - replayed)
    tolerance = _tolerance(run, SimTier.NVME in plan.slots)
    read, put = run.pages_checked * run.page_bytes, run.pages_put * run.page_bytes
    return {
        "kvtier_bench": "live",
        "format": FORMAT,
        "requests": run.requests,
        "ended": run.ended,
        "plane": run.plane,
        "page_bytes": run.page_bytes,
        "wall_s": run.wall_s,
        "hit_ratio": live,
        "hit_ratio_nvme_blocks": float(sum(run.from_nvme) / max(1, int(trace.blocks.sum()))),
        "simulated": {
            "hit_ratio": replayed,
            "policy": plan.policy,
            "write": plan.write.value,
            "pages": {tier.value: slots for tier, slots in plan.slots.items()},
        },
        "difference_points": difference,
        "tolerance_points": tolerance,
        "is_within_tolerance": None if tolerance is None else abs(difference) <= tolerance,
        "pages_checked": run.pages_checked,
        "pages_wrong": run.wrong,
        "first_wrong_key": run.first_wrong,
        "outcomes": dict(sorted(run.outcomes.items())),
        "get": _speed(run.get_s, read),
        "put": _speed([one for one in run.put_s if one], put),
        "late_p95_s": _percentile(run.late_s, 95),
    }


def _tolerance(run: LiveRun, has_nvme: bool) -> float | None:
    """None: too short to be compared."""
    if run.plane == "grpc":
        return TOLERANCE[has_nvme]
    return TOLERANCE[has_nvme] + TOLERANCE_SHARED if run.wall_s >= SHARED_LASTS_S else None


def _speed(seconds: list[float], size: int) -> dict[str, float]:
    """Of all calls of a request together."""
    return {
        "bytes": size,
        "gigabytes_per_s": size / 1e9 / max(1e-9, sum(seconds)),
        **{f"p{at}_s": _percentile(seconds, at) for at in (50, 95, 99)},
    }


def _percentile(values: list[float], at: int) -> float:
    return float(np.percentile(values, at)) if values else 0.0
