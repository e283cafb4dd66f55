"""What an engine could say of a conversation with a get or put, from what the trace shows to come.

It is right here, always: what the hints are worth at most. One thread.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvtier.bench.trace import Trace

__all__ = ["ENDED", "UNSAID", "Hints", "returns"]

#: In `returns`, for seconds: the conversation has ended; nothing is said.
ENDED = -1.0
UNSAID = np.inf


class Hints(StrEnum):
    """What is said."""

    NONE = "none"
    END = "end"  # that a session's last request was that
    RETURN = "return"  # of every other one, when the next comes
    BOTH = "both"


def returns(trace: Trace, hints: Hints) -> npt.NDArray[np.float64]:
    """For each request: seconds until the next one of its session, ENDED, or UNSAID."""
    found = np.full(trace.requests, UNSAID)
    order = np.lexsort((np.arange(trace.requests), trace.session))
    goes_on = trace.session[order[1:]] == trace.session[order[:-1]]
    if hints in (Hints.RETURN, Hints.BOTH):
        gaps = trace.arrival_s[order[1:]] - trace.arrival_s[order[:-1]]
        found[order[:-1][goes_on]] = np.maximum(gaps[goes_on], 0.0)
    if hints in (Hints.END, Hints.BOTH) and trace.requests:
        found[order[:-1][~goes_on]] = found[order[-1]] = ENDED
    return found
