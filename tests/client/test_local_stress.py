"""Four writers and eight readers on 64 pages that are evicted, deleted, written anew and damaged
all the time: no cell of another page or another version in any page that is got.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def stress(process, seconds: float, seed: int) -> dict[str, int]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.client.local_stress"),
            *(process.url, str(process.pid), str(seconds), str(seed)),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds + 90,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    sys.stdout.write(f"seed {seed}: {seen}\n")
    assert "died" not in seen, done.stderr
    assert [what for what in seen if what.startswith("wrong")] == []
    return seen


def took_every_branch(seen: dict[str, int]) -> None:
    """Each way a read by shared memory can be in doubt was really taken."""
    assert seen["HIT"] > 0
    assert seen["raced"] > 0, "an entry changed while its page was copied; looked at once more"
    assert seen["sums_failed"] > seen["raced"], "also with an entry that had not changed"
    assert seen["left"] > 0, "left to the daemon"
    assert seen["put stored"] > 0
    assert seen["put existed"] > 0


def test_nobody_gets_a_foreign_or_torn_page(process):
    took_every_branch(stress(process, 5, 1))


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3])
def test_nobody_gets_a_foreign_or_torn_page_in_a_minute(process, seed):
    took_every_branch(stress(process, 60, seed))
