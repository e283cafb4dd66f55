"""What an update of the weights came to on all ranks together.

Promise: every rank of a group that calls `agreed` gets the same answer, and DONE only if each of
them said so. A rank that served a name while another has other weights would store KV computed with
those under it.

It is a collective of the tensor parallel ranks, on the CPU, in the scheduler's thread, in which
SGLang runs its own at the same place; never in the way of a page.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from kvtier_sglang.weights import Outcome

__all__ = ["agreed"]


def agreed(outcome: Outcome, group: Any) -> Outcome:
    """The outcome of all ranks of `group`, a process group of the CPU. Raises what torch raises
    when a rank has gone.
    """
    said = torch.tensor(
        [outcome is Outcome.DONE, outcome is Outcome.UNTOUCHED], dtype=torch.int32, device="cpu"
    )
    dist.all_reduce(said, op=dist.ReduceOp.MIN, group=group)
    all_done, all_untouched = said.tolist()
    if all_done:
        return Outcome.DONE
    return Outcome.UNTOUCHED if all_untouched else Outcome.DOUBTFUL
