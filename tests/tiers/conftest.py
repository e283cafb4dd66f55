"""Pools of I/O threads and work that hangs until it is let go."""

from __future__ import annotations

import pytest
from pool_parts import SOON_S, Gate

from kvtier.tiers.io_pool import IoPool


@pytest.fixture
def gates():
    """Makes gates."""
    made = []

    def make():
        made.append(Gate())
        return made[-1]

    make.made = made
    return make


@pytest.fixture
def new_pool(gates):
    """Makes pools. In the end every gate is let go, so that all threads end."""
    made = []

    def make(threads=1, queue_max=100):
        made.append(IoPool(threads=threads, name="kvtier-test", queue_max=queue_max))
        return made[-1]

    yield make
    for gate in gates.made:
        gate.let_go()
    assert [pool.close(SOON_S) for pool in made] == [True] * len(made)
