"""A live run beside the simulator's replay of the same requests, as a document. Pure functions.

Over gRPC the daemon hears of each use before the next request, as the simulator does. What remains,
in points of the hit ratio: slabs lose their tails, requests longer than a call's window are served
in several calls, and with nvme the cleaner copies ahead. Over shared memory uses reach the daemon
up to a second late, and 2 % of the memory is granted ahead for puts.

What all tiers find and what each of them finds are compared. A run has no verdict when nothing of
it was done, when a second is much in it (over shared memory), and when it puts faster than the
daemon copies to nvme, so that pages give way without a copy: the simulator loses none. How many did
is not known of a run that ended before its last request.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from kvtier.bench.live import LiveRun
from kvtier.bench.replay import Replay, ReplayPlan, SimTier, WritePolicy
from kvtier.bench.trace import Trace
from kvtier.core.page import GetCode, Tier

__all__ = ["FORMAT", "live_document", "plan_of"]

FORMAT: Final = 2
#: Points, of all tiers together and of each, with host memory alone and with nvme below it.
TOLERANCE: Final = {False: 0.5, True: 3.0}
#: Points more over shared memory, and how many seconds a run must last to be compared.
TOLERANCE_SHARED: Final = 2.0
SHARED_LASTS_S: Final = 50.0
#: Of the pages put, how many may give way without a copy.
LOST_SHARE: Final = 0.01
#: Outcomes of a get that no load explains.
_FAULTS: Final = (GetCode.CORRUPT, GetCode.IO_ERROR)
_HEADER_BYTES: Final = 4096
_SLAB_BYTES: Final = 64 << 20
_SIDES: Final = ("hit_ratio", "hit_ratio_simulated")


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
    plan = simulated.plan
    tiers = _tiers(trace, run, simulated)
    live, replayed = (math.fsum(tier[name] for tier in tiers.values()) for name in _SIDES)
    differences = [100 * (live - replayed), *(tier["difference_points"] for tier in tiers.values())]
    tolerance, lost = _tolerance(run, has_nvme=SimTier.NVME in plan.slots), _lost(run, simulated)
    reason = _no_verdict(run, lost)
    read, put = run.pages_checked * run.page_bytes, run.pages_stored * run.page_bytes
    return {
        "kvtier_bench": "live",
        "format": FORMAT,
        "requests": run.requests,
        "ended": run.ended,
        "not_deleted": run.not_deleted,
        "plane": run.plane,
        "page_bytes": run.page_bytes,
        "wall_s": run.wall_s,
        "hit_ratio": live,
        "tiers": tiers,
        "simulated": {
            "hit_ratio": replayed,
            "policy": plan.policy,
            "write": plan.write.value,
            "pages": {tier.value: slots for tier, slots in plan.slots.items()},
        },
        "difference_points": differences[0],
        "tolerance_points": tolerance,
        "is_within_tolerance": (
            None if reason else all(abs(one) <= tolerance for one in differences)
        ),
        "no_verdict": reason,
        "pages_checked": run.pages_checked,
        "pages_wrong": run.wrong,
        "first_wrong_key": run.first_wrong,
        "pages_faulty": sum(run.outcomes[f"get {code.name}"] for code in _FAULTS),
        "pages_lost_without_a_copy": lost,
        "daemon_counters": {name: n for name, n in sorted(run.counters.items()) if n},
        "outcomes": dict(sorted(run.outcomes.items())),
        "get": _speed(run.get_s, read),
        "put": _speed([one for one in run.put_s if one], put),
        "late_p95_s": _percentile(run.late_s, 95),
    }


def _tiers(trace: Trace, run: LiveRun, simulated: Replay) -> dict[str, dict[str, float]]:
    """Of each tier the part of input tokens that it had, in both. In the order in which a chain
    leaves memory, its head is in host and its tail in nvme."""
    total = max(1, int(trace.input_tokens.sum()))
    prefix = np.array(run.prefix, np.int32)
    ends = {SimTier.HOST: prefix - np.array(run.from_nvme, np.int32), SimTier.NVME: prefix}
    found, before = {}, (0.0, 0.0)
    end = 0 * prefix
    for tier, hits in simulated.hits.items():
        end = end + hits
        now = [float(trace.tokens(one).sum() / total) for one in (ends[tier], end)]
        live, replayed = (one - other for one, other in zip(now, before, strict=True))
        found[tier.value] = {
            "hit_ratio": live,
            "hit_ratio_simulated": replayed,
            "difference_points": 100 * (live - replayed),
        }
        before = (now[0], now[1])
    return found


def _tolerance(run: LiveRun, *, has_nvme: bool) -> float:
    return TOLERANCE[has_nvme] + (0.0 if run.plane == "grpc" else TOLERANCE_SHARED)


def _lost(run: LiveRun, simulated: Replay) -> int | None:
    """Pages that left host memory, and the daemon, before they were copied to nvme; None: the
    daemon could not be asked."""
    nvme = simulated.traffic.get(SimTier.NVME)
    if nvme is None:
        return 0
    return None if run.ended is not None else max(0, run.counters["evicted_last"] - nvme.evicted)


def _no_verdict(run: LiveRun, lost: int | None) -> str:
    """Why the two cannot be compared, or nothing."""
    if not run.requests:
        return "no request was done"
    if lost is None:
        return "how many pages gave way without a copy could not be asked any more"
    if lost > LOST_SHARE * run.pages_stored:
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
