"""Several replicas behind a router: what it does to the hit ratio, the load and the first token.

Each replica has a cache of its own (of the daemon's policy, see cache.py), and there may be a tier
that all share. Requests arrive when the trace says, whatever the load (open loop), and wait their
turn at their replica. Service model, the same for all: a replica prefills `rate` uncached tokens a
second, a token from the shared tier costs `shared_cost` of that, a token from its own cache
nothing; the first token is there when the prefill is done. There is no decode, and the router knows
all caches as they are at this moment. One thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.bench.caches import make_cache
from kvtier.bench.trace import Paths, Trace

__all__ = ["Fleet", "Router", "Routing", "route"]

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

_MIX: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_WINDOWS: Final = 60


class Router(StrEnum):
    RR = "rr"  # in turn
    LEAST = "least"  # the least work waiting
    SESSION = "session"  # a hash of the session's id
    SESSION_BOUNDED = "session-bounded"  # where the session was, unless that is overloaded
    # The longest cached prefix, whatever the load; none anywhere: the least work waiting. Of equals
    # the first, so that an idle fleet fills from its first replica.
    PREFIX = "prefix"
    KV = "kv"  # the least of uncached tokens and tokens waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`local` and `shared` are blocks; `adoption` is the part of sessions that send their id, as a
    session router needs it. A session stays unless its replica has more than `bound` times the mean
    work waiting, and `bound_s` more."""

    router: Router
    replicas: int
    local: int
    shared: int = 0
    policy: str = "lru"
    adoption: float = 1.0
    rate: float = 8000.0
    shared_cost: float = 0.05
    bound: float = 1.25
    bound_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Of each request: blocks from its replica's cache and from the shared tier, its replica,
    seconds of service and until the first token."""

    fleet: Fleet
    local: Ints
    shared: Ints
    replica: Ints
    service_s: Floats
    first_token_s: Floats

    def imbalance(self) -> float:
        """Busy time of the busiest replica over the mean."""
        busy = np.bincount(self.replica, self.service_s, self.fleet.replicas)
        return float(busy.max() / busy.mean()) if busy.any() else 1.0

    def imbalance_windowed(self, trace: Trace) -> float:
        """The same in each of 60 equal windows of time, averaged by the work of each."""
        arrival = trace.arrival_s - trace.arrival_s[0]
        span = max(1e-9, float(arrival[-1]))
        window = np.minimum((arrival / span * _WINDOWS).astype(np.int64), _WINDOWS - 1)
        cells = np.bincount(
            window * self.fleet.replicas + self.replica,
            self.service_s,
            _WINDOWS * self.fleet.replicas,
        ).reshape(_WINDOWS, -1)
        work = cells.sum(axis=1)
        worst = cells.max(axis=1)[work > 0] * self.fleet.replicas
        return float(worst.sum() / work.sum()) if work.any() else 1.0


def route(trace: Trace, fleet: Fleet, progress: Callable[[int], None] | None = None) -> Routing:
    """`progress` is told now and then how many requests are done."""
    replicas = _Replicas(trace, fleet)
    local, shared = np.zeros((2, trace.requests), np.int32)
    chosen = np.zeros(trace.requests, np.int32)
    service, first = np.zeros((2, trace.requests))
    arrival, session = trace.arrival_s.tolist(), trace.session.tolist()
    for request, path in enumerate(Paths(trace)):
        replicas.now = arrival[request]
        at = replicas.choose(path, session[request], request)
        chosen[request] = at
        one = slice(request, request + 1)
        local[one], shared[one] = replicas.serve(at, path)
        service[one] = replicas.work(request, local[one], shared[one])
        first[request] = replicas.run(at, float(service[request]))
        if progress is not None and not request % 64:
            progress(request)
    return Routing(
        fleet=fleet,
        local=local,
        shared=shared,
        replica=chosen,
        service_s=service,
        first_token_s=first,
    )


class _Replicas:
    def __init__(self, trace: Trace, fleet: Fleet) -> None:
        self._fleet = fleet
        self._trace = trace
        self._caches = [
            make_cache(trace.parent, fleet.local, fleet.policy) for _ in range(fleet.replicas)
        ]
        self._shared = None
        if fleet.shared:
            self._shared = make_cache(trace.parent, fleet.shared, fleet.policy)
        self._free_at = [0.0] * fleet.replicas
        # Of each replica: (when it is done, seconds of service) of what is not done yet.
        self._queues: list[deque[tuple[float, float]]] = [deque() for _ in range(fleet.replicas)]
        self._queued = [0.0] * fleet.replicas
        self._turn = 0
        self._home: dict[int, int] = {}
        self.now = 0.0

    def serve(self, at: int, path: Ints) -> tuple[int, int]:
        """(blocks from the replica's own cache, from the shared tier)."""
        cache, shared = self._caches[at], self._shared
        own = end = cache.prefix(path)
        if shared is not None:
            end = max(own, shared.prefix(path))
            used = path[:end]
            used = used[shared.has(used)]
            if len(used):
                shared.touch(used)
            new = path[end:]
            shared.store(new[~shared.has(new)])
        if own:
            cache.touch(path[:own])
        cache.store(path[own:])
        return own, end - own

    def work(self, request: int, local: Ints, shared: Ints) -> Floats:
        """Seconds of service of a request, for each number of blocks found."""
        trace, fleet = self._trace, self._fleet
        own, found = trace.tokens(local, request), trace.tokens(local + shared, request)
        uncached = trace.input_tokens[request] - found
        seconds: Floats = (uncached + fleet.shared_cost * (found - own)) / fleet.rate
        return seconds

    def run(self, at: int, service_s: float) -> float:
        """The replica takes the request; seconds until the first token."""
        self._free_at[at] = max(self._free_at[at], self.now) + service_s
        self._queues[at].append((self._free_at[at], service_s))
        self._queued[at] += service_s
        return self._free_at[at] - self.now

    def choose(self, path: Ints, session: int, request: int) -> int:
        """The replica for a request."""
        router = self._fleet.router
        if router is Router.LEAST:
            return self._least()
        if router in (Router.SESSION, Router.SESSION_BOUNDED):
            mixed = _mixed(session)
            # Other bits than those that choose the replica.
            if (mixed >> 40) / (1 << 24) >= self._fleet.adoption:
                return self._next()
            if router is Router.SESSION:
                return (mixed & 0xFFFFFFFF) % self._fleet.replicas
            return self._bounded(session)
        if router is Router.PREFIX:
            found = [cache.prefix(path) for cache in self._caches]
            if any(found):
                return found.index(max(found))
            waiting = [self._waiting(at) for at in range(self._fleet.replicas)]
            return waiting.index(min(waiting))
        if router is Router.KV:
            return self._cheapest(path, request)
        return self._next()

    def _next(self) -> int:
        self._turn += 1
        return (self._turn - 1) % self._fleet.replicas

    def _waiting(self, at: int) -> float:
        """Seconds of all that is not done; what is being served counts whole."""
        queue = self._queues[at]
        while queue and queue[0][0] <= self.now:
            self._queued[at] -= queue.popleft()[1]
        return self._queued[at] if queue else 0.0

    def _least(self) -> int:
        """In turn among those that have nothing to do."""
        self._turn += 1
        n = self._fleet.replicas
        return min(range(n), key=lambda at: (self._waiting(at), (at - self._turn) % n))

    def _bounded(self, session: int) -> int:
        fleet = self._fleet
        home = self._home.get(session)
        if home is not None:
            mean = sum(map(self._waiting, range(fleet.replicas))) / fleet.replicas
            if self._waiting(home) <= fleet.bound * mean + fleet.bound_s:
                return home
        self._home[session] = home = self._least()
        return home

    def _cheapest(self, path: Ints, request: int) -> int:
        """Tokens of the shared tier count as uncached: its pages are the same for all."""
        self._turn += 1
        n, turn = self._fleet.replicas, self._turn
        found = np.array([cache.prefix(path) for cache in self._caches], np.int32)
        work = self.work(request, found, np.zeros_like(found)).tolist()
        cost = [seconds + self._waiting(at) for at, seconds in enumerate(work)]
        return min(range(n), key=lambda at: (cost[at], (at - turn) % n))


def _mixed(number: int) -> int:
    """64 bits that look random, the same in every process (a step of SplitMix64)."""
    z = (number + 1) * _MIX & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
