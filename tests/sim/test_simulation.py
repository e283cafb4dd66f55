"""Many seeds of the whole-system simulation.

A failure names its seed: `World(seed).run(1200)` replays it step by step.
"""

from __future__ import annotations

import os
import sys
import time

import pytest

from tests.sim.world import World, run_seeds

STEPS = 1200
#: Of the long run, in so many parts.
SEEDS, CHUNKS = 400, 8
FIRST_SEED = 1_000_000


@pytest.mark.timeout(240)
def test_seeds() -> None:
    counts = run_seeds(range(20), STEPS)
    # Also that the run has seen enough of everything to mean something.
    assert counts.stored > 1000
    assert counts.stored_local > 100
    assert counts.hits_host > 300
    assert counts.hits_nvme > 100
    assert counts.flips > 100
    assert counts.corrupt > 10
    assert counts.demoted > 300
    assert counts.promoted > 100
    assert counts.checkpoints > 100
    assert min(counts.kills, counts.power_cuts, counts.stops) > 10
    assert counts.demanded > 300
    assert counts.without > 10
    assert counts.back > 20


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_many_seeds(chunk: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Says how far it is: a seed that takes long, or never ends, has a name."""
    seeds = -(-int(os.environ.get("KVTIER_SIM_SEEDS", str(SEEDS))) // CHUNKS)
    first = FIRST_SEED + chunk * seeds
    began = time.monotonic()

    def tell(seed: int) -> None:
        done = seed - first + 1
        if done % 10 == 0 or done == seeds:
            say(f"{done} of {seeds} seeds from {first}, {time.monotonic() - began:.0f} s")

    def say(words: str) -> None:
        with capfd.disabled():
            sys.stderr.write(f"\nsimulation {chunk + 1}/{CHUNKS}: {words}")

    counts = run_seeds(range(first, first + seeds), STEPS, tell=tell)
    say(f"{counts}\n")
    assert counts.corrupt > 0
    assert counts.demanded > 0


def test_a_seed_is_one_run() -> None:
    traces = []
    for seed in (7, 7, 8):
        world = World(seed)
        world.run(STEPS)
        traces.append((world.trace, str(world.counts)))
    assert traces[0] == traces[1]
    assert traces[0] != traces[2]
