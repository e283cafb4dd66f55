"""What engines could say of sessions, from what a trace shows, and what a replay makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvtier.bench.formats import ReadOptions, read_trace
from kvtier.bench.replay import ReplayPlan, SimTier, replay
from kvtier.bench.returns import ENDED, UNSAID, Hints, returns
from kvtier.bench.trace import Trace


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """Sessions a, b, a, c, a, b at seconds 0, 1, 3, 4, 10, 11."""
    rows = [("a", 0, 1), ("b", 1, 2), ("a", 3, 1), ("c", 4, 3), ("a", 10, 1), ("b", 11, 2)]
    lines = [
        json.dumps(
            {
                "timestamp": second * 1000,
                "input_length": 1024,
                "output_length": 10,
                "hash_ids": [block * 10, block * 10 + 1],
                "session_id": session,
            }
        )
        for session, second, block in rows
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return read_trace(path, ReadOptions(block_tokens=512))


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        (Hints.NONE, [UNSAID] * 6),
        (Hints.END, [UNSAID, UNSAID, UNSAID, ENDED, ENDED, ENDED]),
        (Hints.RETURN, [3.0, 10.0, 7.0, UNSAID, UNSAID, UNSAID]),
        (Hints.BOTH, [3.0, 10.0, 7.0, ENDED, ENDED, ENDED]),
    ],
)
def test_what_is_said(trace: Trace, hints: Hints, expected: list[float]) -> None:
    assert returns(trace, hints).tolist() == expected


def test_a_policy_that_hears_nothing_is_not_changed(trace: Trace) -> None:
    found = [
        replay(trace, ReplayPlan(slots={SimTier.HOST: 4}, policy="arc", hints=hints)).prefix
        for hints in Hints
    ]
    assert all(np.array_equal(found[0], other) for other in found)
