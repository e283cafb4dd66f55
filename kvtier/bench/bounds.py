"""What no policy can exceed: a cache that never evicts, and one that knows the future.

`optimum` is Belady's MIN with bypass for caches closed under prefixes. A block's next use is never
later than that of a block after it, so all cached blocks that are used next by one request lie on
its path, and what is cached of them is known by their number alone: of the blocks whose next use is
the latest, the deepest go first, and a request finds as many as are left for it. (L. A. Belady, "A
study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.)

Pure functions.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from kvtier.bench.trace import Paths, Trace

__all__ = ["Optimum", "ceiling", "ceiling_with_ttl", "last_used_by_own", "own_prefix"]

Ints = npt.NDArray[np.int32]


def ceiling(trace: Trace) -> Ints:
    """Of each request, the leading blocks that any request before it had: the hits of a cache that
    is infinite."""
    seen = np.zeros(trace.blocks_seen, np.bool_)
    found = np.empty(trace.requests, np.int32)
    for request, path in enumerate(Paths(trace)):
        found[request] = np.count_nonzero(seen[path])
        seen[path] = True
    return found


def ceiling_with_ttl(trace: Trace, ttl_s: float) -> Ints:
    """As `ceiling`, of a cache that forgets what was not used for longer than `ttl_s`."""
    used_s = np.full(trace.blocks_seen, -np.inf)
    found = np.empty(trace.requests, np.int32)
    arrival = trace.arrival_s.tolist()
    for request, path in enumerate(Paths(trace)):
        # A block is used whenever one after it is: from the first that is too old, all are.
        found[request] = np.count_nonzero(used_s[path] >= arrival[request] - ttl_s)
        used_s[path] = arrival[request]
    return found


def own_prefix(trace: Trace) -> Ints:
    """Of each request, the leading blocks that a request of its own session before it had."""
    had_by = np.full(trace.blocks_seen, -1, np.int32)
    found = np.empty(trace.requests, np.int32)
    paths, session = Paths(trace), trace.session
    for request in np.argsort(session, kind="stable").tolist():
        path = paths[request]
        found[request] = np.count_nonzero(had_by[path] == session[request])
        had_by[path] = session[request]
    return found


def last_used_by_own(trace: Trace) -> npt.NDArray[np.int64]:
    """Of each request, the tokens of those blocks whose last user was its own session."""
    user = np.full(trace.blocks_seen, -1, np.int32)
    found = np.empty(trace.requests, np.int64)
    session, known = trace.session.tolist(), trace.known_tokens.tolist()
    for request, path in enumerate(Paths(trace)):
        is_own = user[path] == session[request]
        found[request] = trace.block_tokens * np.count_nonzero(is_own)
        if len(path) and is_own[-1]:  # which may not be full
            found[request] -= trace.block_tokens * len(path) - known[request]
        user[path] = session[request]
    return found


class Optimum:
    """The best that any policy can do, for as many capacities as are asked for."""

    def __init__(self, trace: Trace) -> None:
        self._requests = trace.requests
        self._next, self._counts, self._begin = _runs(trace)

    def hits(self, slots: int) -> Ints:
        """Of each request, the leading blocks that are found."""
        # cached[q]: blocks whose next use is by request q.
        cached = [0] * self._requests
        found = np.empty(self._requests, np.int32)
        latest: list[int] = []  # -q, where cached[q] may be above 0
        total = 0
        nexts, counts, begin = self._next.data, self._counts.data, self._begin.data
        for request in range(self._requests):
            found[request] = cached[request]
            total -= cached[request]
            cached[request] = 0
            for at in range(begin[request], begin[request + 1]):
                user = nexts[at]
                if not cached[user]:
                    heapq.heappush(latest, -user)
                cached[user] += counts[at]
                total += counts[at]
            while total > slots:
                user = -latest[0]
                cut = min(cached[user], total - slots)
                cached[user] -= cut
                total -= cut
                if not cached[user]:
                    heapq.heappop(latest)
        return found


def _runs(trace: Trace) -> tuple[Ints, Ints, npt.NDArray[np.int64]]:
    """Runs of blocks of one request that have one next use: (that request, how many blocks), and
    where the runs of each request begin. Blocks that are never used again are left out."""
    never = trace.requests
    next_use = np.full(trace.blocks_seen, never, np.int32)
    paths = Paths(trace)
    users: list[Ints] = []
    sizes: list[Ints] = []
    for request in range(trace.requests - 1, -1, -1):
        path = paths[request]
        uses = next_use[path]
        edges = np.flatnonzero(uses[1:] != uses[:-1]) + 1
        firsts = np.concatenate([np.zeros(min(1, len(path)), np.int64), edges])
        lengths = np.diff(np.append(firsts, len(path)))
        is_used = uses[firsts] < never
        users.append(uses[firsts][is_used])
        sizes.append(lengths[is_used].astype(np.int32))
        next_use[path] = request
    users.reverse()
    sizes.reverse()
    begin = np.zeros(trace.requests + 1, np.int64)
    begin[1:] = np.cumsum([len(found) for found in users])
    return np.concatenate(users), np.concatenate(sizes), begin
