"""The Gittins policy, compiled, on public traces where KVTIER_TRACES names their folder.

In a process of its own, because tests of its parts import it without compiling.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.hard_traces import HARD

pytest.importorskip("numba", reason="numba is not installed")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
needs_traces = pytest.mark.skipif(
    not os.environ.get("KVTIER_TRACES"), reason="KVTIER_TRACES names no folder of traces"
)
CONVERSATION, SYNTHETIC = "mooncake_conversation.jsonl.gz", "mooncake_synthetic.jsonl.gz"
AGENT, RAG = "claude_code_v6.jsonl.gz", "ragpulse_0_trace.jsonl.gz"


def measured(trace: str, sizes: str, *options: str) -> dict[tuple[str, str], float]:
    """Hit ratio in percent by (size, policy)."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.policies", trace, "--sizes", sizes, *options],
        check=True,
        capture_output=True,
        text=True,
    )
    sys.stdout.write(done.stdout)
    rows = [line.split() for line in done.stdout.splitlines() if "tok " in line]
    return {(row[0], row[1]): float(row[2]) for row in rows}


@needs_traces
@pytest.mark.parametrize(
    ("trace", "size", "policy", "percent"),
    [
        (CONVERSATION, "1Mtok", "gittins-bypass", 10.5),
        (CONVERSATION, "3Mtok", "gittins", 18.5),
        (CONVERSATION, "3Mtok", "gittins-bypass", 18.5),
        (SYNTHETIC, "3Mtok", "gittins", 34.0),
        (AGENT, "1Mtok", "gittins", 56.0),
        (AGENT, "1Mtok", "gittins-bypass", 60.0),
    ],
)
def test_beats_lru_where_memory_is_short(
    trace: str, size: str, policy: str, percent: float
) -> None:
    assert measured(trace, size, "--policies", policy)[size, policy] >= percent


@needs_traces
@pytest.mark.parametrize(
    ("trace", "sizes", "options"),
    [
        (CONVERSATION, "0.3Mtok,5Mtok,10Mtok", ()),
        (SYNTHETIC, "1Mtok,5Mtok", ()),
        (RAG, "0.03Mtok,0.1Mtok", ()),
        (AGENT, "3Mtok,6Mtok", ()),
        *((AGENT, "1Mtok", ("--seed", str(seed))) for seed in range(2, 6)),
        *((AGENT, "1Mtok", ("--hours", hours)) for hours in ("2", "24")),
    ],
)
def test_is_never_far_below_lru(trace: str, sizes: str, options: tuple[str, ...]) -> None:
    found = measured(trace, sizes, "--policies", "lru,gittins,gittins-bypass", *options)
    for (size, policy), percent in found.items():
        if policy != "optimum":
            assert percent >= found[size, "lru"] - 0.5, (size, policy)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", HARD)
def test_is_never_far_below_lru_where_it_is_misled(name: str, seed: int) -> None:
    options = ("--policies", "lru,gittins,gittins-bypass", "--seed", str(seed))
    found = measured(f"made:{name}", "0.3Mtok,0.7Mtok", *options)
    assert len(found) == 8
    for (size, policy), percent in found.items():
        if policy != "optimum":
            assert percent >= found[size, "lru"] - 0.5, (size, policy)
