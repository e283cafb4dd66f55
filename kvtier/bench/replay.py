"""Replays a trace through tiers: what each request finds where, what is written, what gives way.

A request's engine takes the longest prefix that its own cache (tier gpu) has, asks kvtier for the
pages after it, takes those up to the first that neither host nor nvme has, computes the rest and
puts it: the order of calls that an engine makes to the daemon. What comes from a lower tier is
stored in the upper ones, and keeps its copy below (the daemon's tiers are inclusive).

The clock is virtual: a request is served whole at its arrival, and policies count uses, as in the
daemon. One thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvtier.bench.cache import Cache
from kvtier.bench.caches import make_cache
from kvtier.bench.returns import UNSAID, Hints, returns
from kvtier.bench.trace import Paths, Trace

__all__ = ["Replay", "ReplayPlan", "SimTier", "Traffic", "WritePolicy", "replay"]

Ints = npt.NDArray[np.int32]


class SimTier(StrEnum):
    """From the fastest."""

    GPU = "gpu"
    HOST = "host"
    NVME = "nvme"


class WritePolicy(StrEnum):
    """When a page of host memory is written to nvme, as the daemon's `nvme.write_policy`."""

    BACK = "back"  # when it has to give way
    THROUGH = "through"  # when it is put
    SELECTIVE = "selective"  # as back, but only if it was used since it was stored


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """`slots`: blocks of each tier that there is. `told`: the daemon hears of the pages that an
    engine found in its own cache, so that they stay young in the tiers below too. `hints`: what is
    said of a session's return, to policies that heed it. `ttl_s`: what each put says its pages are
    worth keeping for, which host memory heeds; 0: nothing."""

    slots: dict[SimTier, int]
    policy: str = "lru"
    write: WritePolicy = WritePolicy.THROUGH
    told: bool = True
    hints: Hints = Hints.NONE
    ttl_s: float = 0.0


@dataclass(slots=True)
class Traffic:
    """Blocks read from and written to one tier."""

    read: int = 0
    written: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """`hits`: of each request, the blocks found in each tier; together its cached prefix."""

    plan: ReplayPlan
    hits: dict[SimTier, Ints]
    traffic: dict[SimTier, Traffic]

    @property
    def prefix(self) -> Ints:
        """Of each request, the leading blocks that were cached."""
        total: Ints = np.sum(list(self.hits.values()), axis=0, dtype=np.int32)
        return total


def replay(trace: Trace, plan: ReplayPlan, progress: Callable[[int], None] | None = None) -> Replay:
    """`progress` is told now and then how many requests are done."""
    stack = Stack(trace, plan)
    hits = {tier: np.zeros(trace.requests, np.int32) for tier in plan.slots}
    columns = [hits[tier] for tier in plan.slots]
    said = returns(trace, plan.hints).tolist()
    for request, path in enumerate(Paths(trace)):
        stack.begin(trace, request, path)
        for column, count in zip(columns, stack.serve(path), strict=True):
            column[request] = count
        if said[request] != UNSAID and len(path):
            stack.hint(path, said[request])
        if progress is not None and not request % 64:
            progress(request)
    return Replay(plan=plan, hits=hits, traffic=stack.traffic())


class Stack:
    """The tiers of one engine, and what moves between them."""

    def __init__(self, trace: Trace, plan: ReplayPlan) -> None:
        self._plan = plan
        self._caches = {
            tier: make_cache(
                trace.parent,
                slots,
                plan.policy,
                ttl_s=plan.ttl_s if tier is SimTier.HOST else 0.0,
            )
            for tier, slots in plan.slots.items()
        }
        self._gpu = self._caches.get(SimTier.GPU)
        self._host = self._caches.get(SimTier.HOST)
        self._nvme = self._caches.get(SimTier.NVME)
        self._read = dict.fromkeys(plan.slots, 0)
        self._hearing = [cache for cache in self._caches.values() if cache.is_hearing]
        # In one tier alone only whole prefixes are kept: nothing after the first miss is there.
        self._alone = next(iter(plan.slots)) if len(plan.slots) == 1 else None

    def traffic(self) -> dict[SimTier, Traffic]:
        return {
            tier: Traffic(read=self._read[tier], written=cache.stored, evicted=cache.evicted)
            for tier, cache in self._caches.items()
        }

    def begin(self, trace: Trace, request: int, path: Ints) -> None:
        """Tells the time, and policies that hear of requests."""
        now = float(trace.arrival_s[request])
        if self._plan.ttl_s and self._host is not None:
            self._host.tell(now)
        for cache in self._hearing:
            cache.request(
                now,
                path,
                whole=min(len(path), int(trace.input_tokens[request]) // trace.block_tokens),
                output=int(trace.output_tokens[request]),
            )

    def hint(self, path: Ints, returns_after_s: float) -> None:
        """What is said after the request of this path."""
        for cache in self._hearing:
            cache.hint(int(path[-1]), returns_after_s)

    def serve(self, path: Ints) -> list[int]:
        """One request: blocks found in each tier, in the order of the plan."""
        if self._alone is not None:
            count = self._caches[self._alone].serve(path)
            self._read[self._alone] += count
            return [count]
        found = dict.fromkeys(self._plan.slots, 0)
        own = 0
        if self._gpu is not None:
            own = found[SimTier.GPU] = self._gpu.prefix(path)
        end, below = own, path[:0]
        if self._host is not None or self._nvme is not None:
            end, below = self._look_below(path, own)
            found[SimTier.NVME if self._host is None else SimTier.HOST] = end - own - len(below)
            if self._nvme is not None and self._host is not None:
                found[SimTier.NVME] = len(below)
        for tier, count in found.items():
            self._read[tier] += count
        if self._gpu is not None:
            if own:
                self._gpu.touch(path[:own])
            self._gpu.store(path[own:])
        self._use_below(path, own, end, below)
        return list(found.values())

    def _look_below(self, path: Ints, own: int) -> tuple[int, Ints]:
        """(where the cached prefix ends, what of it has to come up from nvme to host)."""
        rest = path[own:]
        upper, lower = self._host or self._nvme, self._nvme
        if upper is None:
            return own, rest[:0]
        is_up = upper.has(rest)
        if upper is lower or lower is None:
            return own + _leading(is_up), rest[:0]
        count = _leading(is_up | lower.has(rest))
        return own + count, rest[:count][~is_up[:count]]

    def _use_below(self, path: Ints, own: int, end: int, below: Ints) -> None:
        host, nvme = self._host, self._nvme
        if host is None:
            if nvme is not None:
                self._use(nvme, path, own, end)
                self._put(nvme, path[end:])
            return
        if nvme is not None:
            used = path[:end] if self._plan.told else below
            used = used[nvme.has(used)]
            if len(used):
                nvme.touch(used)
        self._use(host, path, own, end)
        new = path[end:] if not len(below) else np.concatenate([below, path[end:]])
        new = new[~host.has(new)]
        stored, gone = host.store(new)
        if nvme is None:
            return
        if self._plan.write is WritePolicy.THROUGH:
            self._put(nvme, stored)
        elif len(gone):
            if self._plan.write is WritePolicy.SELECTIVE:
                gone = gone[host.gone_used]
            # The tail of a chain went before its head; together they are written head first.
            self._put(nvme, gone[::-1])

    def _use(self, cache: Cache, path: Ints, own: int, end: int) -> None:
        """What the daemon hears of."""
        used = path[0 if self._plan.told else own : end]
        used = used[cache.has(used)]
        if len(used):
            cache.touch(used)

    @staticmethod
    def _put(cache: Cache, blocks: Ints) -> None:
        new = blocks[~cache.has(blocks)]
        if len(new):
            cache.store(new)


def _leading(is_here: npt.NDArray[np.bool_]) -> int:
    return len(is_here) if bool(is_here.all()) else int(is_here.argmin())
