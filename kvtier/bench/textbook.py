"""FIFO and ARC as their texts have them, over blocks that know nothing of each other: what the
daemon's policies are measured against, and nothing that the daemon runs.

A request looks for its cached prefix, then uses its blocks from the last to the first, so that the
first is the youngest. ARC after
N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", USENIX FAST 2003,
figure 4. One thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.bench.errors import BenchInput
from kvtier.bench.replay import Replay, ReplayPlan, Traffic
from kvtier.bench.trace import Paths, Trace

__all__ = ["TEXTBOOK", "textbook_replay"]

Ints = npt.NDArray[np.int32]
_Queue = OrderedDict[int, None]


class _Textbook(Protocol):
    def __contains__(self, block: int) -> bool: ...

    def access(self, block: int) -> bool:
        """The block is used, and stored if it was not there; whether it was."""


class Fifo:
    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._queue: _Queue = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._queue

    def access(self, block: int) -> bool:
        """See _Textbook."""
        if block in self._queue:
            return True
        if self._slots:
            if len(self._queue) == self._slots:
                self._queue.popitem(last=False)
            self._queue[block] = None
        return False


class TextbookArc:
    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._t1: _Queue = OrderedDict()
        self._t2: _Queue = OrderedDict()
        self._b1: _Queue = OrderedDict()
        self._b2: _Queue = OrderedDict()
        self._target = 0.0

    def __contains__(self, block: int) -> bool:
        return block in self._t1 or block in self._t2

    def access(self, block: int) -> bool:
        """See _Textbook."""
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        if block in t2:
            t2.move_to_end(block)
            return True
        if block in t1:
            del t1[block]
            t2[block] = None
            return True
        if not self._slots:
            return False
        if block in b1:
            self._target = min(float(self._slots), self._target + max(1.0, len(b2) / len(b1)))
            self._replace(came_from_b2=False)
            del b1[block]
            t2[block] = None
        elif block in b2:
            self._target = max(0.0, self._target - max(1.0, len(b1) / len(b2)))
            self._replace(came_from_b2=True)
            del b2[block]
            t2[block] = None
        else:
            self._make_room()
            t1[block] = None
        return False

    def _make_room(self) -> None:
        """For a block without a history."""
        t1, b1, b2 = self._t1, self._b1, self._b2
        if len(t1) + len(b1) == self._slots:
            if len(t1) < self._slots:
                b1.popitem(last=False)
                self._replace(came_from_b2=False)
            else:
                t1.popitem(last=False)
            return
        total = len(t1) + len(self._t2) + len(b1) + len(b2)
        if total >= self._slots:
            if total == 2 * self._slots:
                b2.popitem(last=False)
            self._replace(came_from_b2=False)

    def _replace(self, *, came_from_b2: bool) -> None:
        held = len(self._t1)
        if held and (held > self._target or (came_from_b2 and held == self._target)):
            self._b1[self._t1.popitem(last=False)[0]] = None
        elif self._t2:
            self._b2[self._t2.popitem(last=False)[0]] = None
        elif held:
            self._b1[self._t1.popitem(last=False)[0]] = None


#: By their names on the command line.
TEXTBOOK: Final[dict[str, Callable[[int], _Textbook]]] = {"fifo": Fifo, "arc-textbook": TextbookArc}


def textbook_replay(
    trace: Trace, plan: ReplayPlan, progress: Callable[[int], None] | None = None
) -> Replay:
    """As `replay`, of a plan with one tier. Raises BenchInput for a plan with more."""
    if len(plan.slots) != 1:
        raise BenchInput(
            f"policy {plan.policy} is a textbook's, for one tier alone",
            remedy="name one tier, or a policy of the daemon",
        )
    ((tier, slots),) = plan.slots.items()
    cache = TEXTBOOK[plan.policy](slots)
    found = np.empty(trace.requests, np.int32)
    stored = 0
    for request, path in enumerate(Paths(trace)):
        blocks = path.tolist()
        found[request] = sum(1 for _ in takewhile(cache.__contains__, blocks))
        for block in reversed(blocks):
            stored += not cache.access(block)
        if progress is not None and not request % 64:
            progress(request)
    stored = stored if slots else 0
    traffic = Traffic(read=int(found.sum()), written=stored, evicted=max(0, stored - slots))
    return Replay(plan=plan, hits={tier: found}, traffic={tier: traffic})
