"""Many seeds of the whole-system simulation.

A failure names its seed: `World(seed).run(1200)` replays it step by step.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.sim.world import World, run_seeds

STEPS = 1200


@pytest.mark.timeout(240)
def test_seeds() -> None:
    counts = run_seeds(range(16), STEPS)
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


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_seeds() -> None:
    seeds = int(os.environ.get("KVTIER_SIM_SEEDS", "1000"))
    counts = run_seeds(range(1_000_000, 1_000_000 + seeds), STEPS)
    sys.stderr.write(f"{seeds} seeds from 1000000: {counts}\n")
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
