"""A process that walks through SGLang's HiCache on request: a line of JSON, and one in answer.

    {"walk": "write", "setup": {...}}   a prompt to storage, checked on its way
    {"walk": "read", "setup": {...}}    a fresh engine that finds it, or does not
    {"walk": "read by", "setup": {...}} the same, and which way it came
    {"walk": "conform", "setup": {...}} every conformance check, each on an empty storage
    {"walk": "differ", "setup": {...}}  the same random calls to two backends

It loads SGLang once, which takes longer than a walk. Answers go to the descriptor that was standard
output when it began; whatever else is printed goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from contextlib import closing
from pathlib import Path
from typing import Any

from hicache_bench import HiCacheBench
from hicache_differential import Differential
from hicache_engine import Engine, Setup

from kvtier_sglang.conformance import CHECKS
from kvtier_sglang.conformance_v2 import SIDE_CHECKS

__all__: list[str] = []


def write(setup: Setup) -> dict[str, Any]:
    with closing(Engine(setup)) as engine:
        engine.fill()
        engine.drop_device()
        return {
            "backend": type(engine.controller.storage_backend).__name__,
            "pool": type(engine.controller.mem_pool_host).__name__,
            "on_host": engine.on_host(),
            "identical": engine.load_back(),
        }


def read(setup: Setup) -> dict[str, Any]:
    with closing(Engine(setup)) as engine:
        return _found(engine)


def read_by(setup: Setup) -> dict[str, Any]:
    """As `read`, and which way the bytes came: `local` by the daemon's memory, `memfd` to memory
    that SGLang shares.
    """
    with closing(Engine(setup)) as engine:
        found = _found(engine)
        controller = engine.controller
        ways = {
            "local": controller.storage_backend._connection.local.counts.hits > 0,
            "memfd": controller.storage_host_pool.fd is not None,
        }
        return found | ways


def _found(engine: Engine) -> dict[str, Any]:
    before = engine.on_host()
    prefetched = engine.prefetch()
    on_host = engine.on_host()
    return {
        "before": before,
        "prefetched": prefetched,
        "on_host": on_host,
        "identical": engine.load_back() if on_host else False,
    }


def conform(backend: str, extra: dict[str, Any], storage: str = "") -> dict[str, Any]:
    """What each check came to, as its verdict and the reason. `storage` is for HiCacheBench."""
    results = {}
    for number, check in enumerate((*CHECKS, *SIDE_CHECKS)):
        with tempfile.TemporaryDirectory() as folder:
            # Apart by folder, or by salt where pages are kept elsewhere.
            own = {"file_storage_path": folder, "kvtier_salt": str(number)}
            place = Path(storage or folder)
            with closing(HiCacheBench(backend, extra | own, place, seed=number)) as bench:
                found = check.run(bench)
        results[check.name] = [found.verdict.value, found.reason]
    return results


def differ(seed: int, steps: int, extra: dict[str, Any], *, is_latent: bool) -> dict[str, Any]:
    """What became of the calls; `difference` is None if the backend answered as HiCacheFile."""
    own = {"kvtier_salt": f"differ {seed} {is_latent}"}
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(HiCacheBench("dynamic", extra | own, Path(folder))) as bench,
        closing(HiCacheBench("file", {"file_storage_path": folder}, Path(folder))) as reference,
    ):
        return Differential(bench, reference, seed=seed, is_latent=is_latent).run(steps)


def main(requests: Any, answers: Any) -> None:
    walks = {
        "write": lambda setup: write(Setup(**setup)),
        "read": lambda setup: read(Setup(**setup)),
        "read by": lambda setup: read_by(Setup(**setup)),
        "conform": lambda setup: conform(**setup),
        "differ": lambda setup: differ(**setup),
    }
    answers.write("{}\n")
    for line in requests:
        asked = json.loads(line)
        try:
            answer = walks[asked["walk"]](asked["setup"])
        except Exception as error:  # noqa: BLE001 - the test is told, in the other process
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    kept = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    main(sys.stdin, kept)
