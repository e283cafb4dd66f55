"""What an update of the weights came to on all ranks together, by a real collective."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from sglang_rig import HERE

from kvtier_sglang.weights import Outcome

_ANSWER_S = 120.0


def test_processes_agree(tmp_path):
    ways = [(one, other) for one in Outcome for other in Outcome]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "agreement_process.py"), str(rank), "2",
             str(tmp_path / "store"), *(way[rank].value for way in ways)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        found = [json.loads(process.communicate(timeout=_ANSWER_S)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    expected = [(one if one is other else Outcome.DOUBTFUL).value for one, other in ways]
    assert found == [expected, expected]
