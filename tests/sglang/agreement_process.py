"""A rank that says what its updates came to, for tests of kvtier_sglang.agreement.

Started with its rank, the number of ranks, a file that all of them have, and for each update what
it came to here. Prints a line of JSON: what each came to on all.
"""

from __future__ import annotations

import json
import sys

import torch.distributed as dist

from kvtier_sglang.agreement import agreed
from kvtier_sglang.weights import Outcome


def main(rank: int, ranks: int, store: str, outcomes: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    found = [agreed(Outcome(outcome), group).value for outcome in outcomes]
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
