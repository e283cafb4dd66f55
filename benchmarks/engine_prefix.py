"""Time to the first token: a long prompt whose beginning lies in each tier, and a fresh process.

    python -m benchmarks.engine_prefix [--quick] [--rounds 3] [--only ttft] [--json FILE]

SmolLM2-135M in bfloat16 on the CPU, pages of 64 tokens. A prompt of 2,008 random tokens, another
one in each round, of which 1,984 are whole pages that may be found. `ttft/` counts from `submit` to
the first token, within one engine process:

* recompute: nothing is found (the daemon is asked, and misses)
* device: the same engine again
* host: another engine, with an empty pool
* nvme: another engine, and the daemon was killed and started meanwhile, so host memory is empty
* restart: the daemon was killed and is started, and when it is READY a process begins with nothing
  (imports, weights, pool, connection): from the start of the daemon to that process's first token
  of the prompt, all included; beside it such a process that has no daemon and computes all

`start/` is a process that begins and answers a prompt of a few tokens, without a daemon. Both sides
have torch's own number of threads (OMP_NUM_THREADS).
"""

from __future__ import annotations

import json
import random
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch

import kvtier
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Row
from kvtier.client import Connection
from kvtier.client.device import DevicePool
from kvtier.testing.daemon_process import DaemonProcess
from kvtier_engine.cache.tiers import KvtierTiers
from kvtier_engine.engine import Engine
from kvtier_engine.model.load import LoadedModel, load_model
from kvtier_engine.schedule.request import CachedTokens, Request, Sampling
from kvtier_engine.settings import layout_of
from kvtier_engine.smollm2 import ensure_model

PAGE_TOKENS, PREFIX_TOKENS, PROMPT_TOKENS = 64, 1984, 2008
POOL_PAGES = 48
FIRST_TOKEN_SECONDS_MAX = 600.0
#: After it: the offloads that it waits for, and its end.
END_SECONDS_MAX = 120.0
TIERS = ("device", "host", "nvme")

#: A process that answers one prompt; the arguments are a file with tokens and the daemon, or "".
_CHILD = """
import json, pathlib, resource, sys
import torch
from benchmarks.engine_prefix import answered, engine_on
from kvtier_engine.model.load import load_model
from kvtier_engine.smollm2 import ensure_model
import kvtier
prompt, url = json.load(open(sys.argv[1])), sys.argv[2]
model = load_model(ensure_model().directory, dtype=torch.bfloat16)
def run(kv):
    with engine_on(model, kv) as engine:
        done = answered(engine, prompt)
        print("first", flush=True)
        print(json.dumps({
            "cached": done.total,
            "threads": torch.get_num_threads(),
            "pool": engine.pool.rows.nbytes,
            "weights": model.network.weights.nbytes,
            "resident": int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            * resource.getpagesize(),
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }), flush=True)
if url:
    with kvtier.connect(url, deadline=20) as kv:
        run(kv)
else:
    run(None)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """`seconds` from the start of the process, or of what `started` was told, to its first token;
    sizes in bytes.
    """

    seconds: float
    cached: int
    threads: int
    pool: int
    weights: int
    resident: int
    peak: int


@contextmanager
def engine_on(model: LoadedModel, kv: Connection | None) -> Iterator[Engine]:
    pool = DevicePool(layout_of(model, page_tokens=PAGE_TOKENS), POOL_PAGES)
    tiers = KvtierTiers(kv, pool, deadline_seconds=20) if kv else None
    try:
        yield Engine(model, pool, tiers=tiers)
    finally:
        if tiers:
            tiers.drain(60)
            tiers.close()


def answered(engine: Engine, prompt: list[int]) -> CachedTokens:
    """One token of it; where its prefix was found."""
    return ttft(engine, prompt)[1]


def ttft(engine: Engine, prompt: list[int]) -> tuple[float, CachedTokens]:
    sampling = Sampling(max_tokens=1, ignore_end=True)
    handle = engine.submit(Request(prompt=tuple(prompt), sampling=sampling))
    engine.run_until_idle()
    done = handle.result(0)
    return done.first_token_seconds, done.cached


def prompt_of(model: LoadedModel, plan: Plan, number: int) -> list[int]:
    draw = random.Random(plan.seed * 1000 + number)
    tokens = plan.sized(PROMPT_TOKENS, 3 * PAGE_TOKENS + 5)
    return [draw.randrange(100, model.network.config.vocab_size) for _ in range(tokens)]


def a_round(model: LoadedModel, home: Path, prompt: list[int]) -> dict[str, float]:
    """Seconds from each tier."""
    found: dict[str, float] = {}
    prefix = len(prompt) // PAGE_TOKENS * PAGE_TOKENS
    settings = ("host.bytes=256MiB", f"nvme.paths={home}/nvme", "nvme.bytes=1GiB")

    def take(name: str, engine: Engine) -> None:
        found[name], cached = ttft(engine, prompt)
        wanted = CachedTokens(**{name: prefix}) if name in TIERS else CachedTokens()
        if cached != wanted:
            raise RuntimeError(f"{name}: found {cached}, not {wanted}")

    with DaemonProcess(home, *settings) as daemon:
        with kvtier.connect(daemon.url, deadline=20) as kv:
            with engine_on(model, kv) as engine:
                take("recompute", engine)
                take("device", engine)
            with engine_on(model, kv) as engine:
                take("host", engine)
            kv.flush(deadline=60)
        daemon.kill()
        daemon.start()
        with kvtier.connect(daemon.url, deadline=20) as kv, engine_on(model, kv) as engine:
            take("nvme", engine)
        daemon.kill()
        child = restarted(daemon, home, prompt)
        if child.cached != prefix:
            raise RuntimeError(f"after the restart {child.cached} tokens were found")
        found["restart"] = child.seconds
    found["fresh"] = started(home, prompt, "").seconds
    return found


def restarted(daemon: DaemonProcess, home: Path, prompt: list[int]) -> Child:
    """A daemon that was killed, and then a process of its own; the time is that of both."""
    began = monotonic()
    daemon.start()
    return started(home, prompt, daemon.url, began=began)


def started(home: Path, prompt: list[int], url: str, *, began: float | None = None) -> Child:
    """A process of its own, timed from `began` (by default: from its start). Raises RuntimeError
    for one that fails, hangs, or has another number of threads than this process.
    """
    file = home / "prompt.json"
    file.write_text(json.dumps(prompt), encoding="utf-8")
    began = monotonic() if began is None else began
    command = [sys.executable, "-c", _CHILD, str(file), url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            heard, _, _ = select.select([process.stdout], [], [], FIRST_TOKEN_SECONDS_MAX)
            seconds = monotonic() - began
            if not heard:
                raise RuntimeError(f"no first token in {FIRST_TOKEN_SECONDS_MAX:g} s")
            out, _ = process.communicate(timeout=END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not ended {END_SECONDS_MAX:g} s after its first token") from None
        finally:
            process.kill()
    first, _, rest = out.decode().partition("\n")
    if first != "first" or process.returncode:
        raise RuntimeError(f"the process ended with {process.returncode}")
    child = Child(seconds=seconds, **json.loads(rest))
    if child.threads != torch.get_num_threads():
        raise RuntimeError(f"{child.threads} threads there, {torch.get_num_threads()} here")
    return child


def from_tiers(model: LoadedModel, plan: Plan) -> Iterator[Measured]:
    rounds: list[dict[str, float]] = []
    for number in range(plan.rounds(3)):
        progress(f"ttft, round {number + 1}")
        with tempfile.TemporaryDirectory(prefix="kvt-", dir=plan.directory) as home:
            rounds.append(a_round(model, Path(home), prompt_of(model, plan, number)))
    tokens = len(prompt_of(model, plan, 0))
    note = f"{torch.get_num_threads()} threads"
    yield Row.of_values(
        "ttft/recompute",
        f"first token of {tokens}, computed",
        [one["recompute"] for one in rounds],
        "s",
        note=note,
    )
    for tier in TIERS:
        yield Row.of_pairs(
            f"ttft/{tier}",
            f"first token of {tokens}, prefix from {tier}",
            [(one[tier], one["recompute"]) for one in rounds],
            "s",
            "recompute",
            note=note,
        )
    yield Row.of_pairs(
        "ttft/restart",
        f"start of the daemon, then of an engine, to the first token of {tokens}",
        [(one["restart"], one["fresh"]) for one in rounds],
        "s",
        "such an engine without a daemon, computed",
        note=note,
    )


def starts(model: LoadedModel, plan: Plan) -> Iterator[Measured]:
    progress("start")
    made: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="kvt-") as home:
        prompt = model.tokenizer.encode("The cat sat on")
        made += [started(Path(home), prompt, "") for _ in range(plan.rounds(3))]
    yield Row.of_values(
        "start/first-token",
        "start of a process to its first token",
        [one.seconds for one in made],
        "s",
        note="torch is imported, weights are read; the files were read before",
    )
    yield Row.of_values(
        "start/memory",
        "resident memory after the first token, less weights and pool",
        [(one.resident - one.weights - one.pool) / 1e6 for one in made],
        "MB",
        note=f"weights {made[0].weights / 1e6:.0f} MB, pool {made[0].pool / 1e6:.0f} MB; the most "
        f"at a time {max(one.peak for one in made) / 1e6:.0f} MB, with them",
    )


def rows(plan: Plan) -> Iterator[Measured]:
    kvtier.warm_up()
    model = load_model(ensure_model().directory, dtype=torch.bfloat16)
    if plan.wants_some("ttft"):
        yield from from_tiers(model, plan)
    if plan.wants_some("start"):
        yield from starts(model, plan)


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("First token", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    sys.exit(main())
