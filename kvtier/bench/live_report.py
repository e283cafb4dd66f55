"""A live run beside the simulator's replay of the same requests, as a document. Pure functions.

Over gRPC the daemon hears of each use before the next request, as the simulator does. What remains,
in points of the hit ratio: slabs lose their tails, requests longer than a call's window are served
in several calls, and with nvme the cleaner copies ahead. Over shared memory uses reach the daemon
up to a second late, and 2 % of the memory is granted ahead for puts.

Two runs have no verdict: one over shared memory in which a second is much, and one that puts faster
than the daemon copies to nvme, so that pages give way without a copy; the simulator loses none.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvtier.bench.live import LiveRun
from kvtier.bench.replay import Replay, ReplayPlan, SimTier, WritePolicy
from kvtier.bench.trace import Trace
from kvtier.core.page import Tier

__all__ = ["FORMAT", "live_document", "plan_of"]

FORMAT: Final = 1
#: Points, with host memory alone and with nvme below it.
TOLERANCE: Final = {False: 0.5, True: 3.0}
#: Points more over shared memory, and how many seconds a run must last to be compared.
TOLERANCE_SHARED: Final = 2.0
SHARED_LASTS_S: Final = 50.0
#: Of the pages put, how many may give way without a copy.
LOST_SHARE: Final = 0.01
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


def live_document(trace: Trace, run: LiveRun, simulated: Replay) -> dict[str, Any]:
    """`trace`: the requests that were done; `simulated`: their replay by `plan_of` the run."""
    found, plan = np.array(run.prefix, np.int32), simulated.plan
    total = max(1, int(trace.input_tokens.sum()))
    live, replayed = (
        float(trace.tokens(prefix).sum() / total) for prefix in (found, simulated.prefix)
    )
    difference = 100 * (live - replayed)
    tolerance, lost = _tolerance(run, has_nvme=SimTier.NVME in plan.slots), _lost(run, simulated)
    reason = _no_verdict(run, lost)
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
        "is_within_tolerance": None if reason else abs(difference) <= tolerance,
        "no_verdict": reason,
        "pages_checked": run.pages_checked,
        "pages_wrong": run.wrong,
        "first_wrong_key": run.first_wrong,
        "pages_lost_without_a_copy": lost,
        "daemon_counters": {name: n for name, n in sorted(run.counters.items()) if n},
        "outcomes": dict(sorted(run.outcomes.items())),
        "get": _speed(run.get_s, read),
        "put": _speed([one for one in run.put_s if one], put),
        "late_p95_s": _percentile(run.late_s, 95),
    }


def _tolerance(run: LiveRun, *, has_nvme: bool) -> float:
    return TOLERANCE[has_nvme] + (0.0 if run.plane == "grpc" else TOLERANCE_SHARED)


def _lost(run: LiveRun, simulated: Replay) -> int:
    """Pages that left host memory, and the daemon, before they were copied to nvme."""
    nvme = simulated.traffic.get(SimTier.NVME)
    return 0 if nvme is None else max(0, run.counters["evicted_last"] - nvme.evicted)


def _no_verdict(run: LiveRun, lost: int) -> str:
    """Why the two cannot be compared, or nothing."""
    if lost > LOST_SHARE * run.pages_put:
        return (
            f"{lost} pages gave way before the daemon had copied them to nvme; a --speedup that it "
            "keeps up with compares"
        )
    if run.plane != "grpc" and run.wall_s < SHARED_LASTS_S:
        return (
            "over shared memory uses reach the daemon up to a second late, which is much in "
            f"{run.wall_s:.1f} s; --plane grpc compares, or a lower --speedup"
        )
    return ""


def _speed(seconds: list[float], size: int) -> dict[str, float]:
    """Of all calls of a request together."""
    return {
        "bytes": size,
        "gigabytes_per_s": size / 1e9 / max(1e-9, sum(seconds)),
        **{f"p{at}_s": _percentile(seconds, at) for at in (50, 95, 99)},
    }


def _percentile(values: list[float], at: int) -> float:
    return float(np.percentile(values, at)) if values else 0.0
