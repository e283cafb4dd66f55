"""A process that walks through SGLang's HiCache on request: a line of JSON, and one in answer.

    {"walk": "write", "setup": {...}}   a prompt to storage, checked on its way
    {"walk": "read", "setup": {...}}    a fresh engine that finds it, or does not
    {"walk": "conform", "setup": {...}} every conformance check, each on an empty storage

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
from hicache_engine import Engine, Setup

from kvtier_sglang.conformance import CHECKS

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
    for number, check in enumerate(CHECKS):
        with tempfile.TemporaryDirectory() as folder:
            # Apart by folder, or by salt where pages are kept elsewhere.
            own = {"file_storage_path": folder, "kvtier_salt": str(number)}
            place = Path(storage or folder)
            with closing(HiCacheBench(backend, extra | own, place, seed=number)) as bench:
                found = check.run(bench)
        results[check.name] = [found.verdict.value, found.reason]
    return results


def main(requests: Any, answers: Any) -> None:
    walks = {
        "write": lambda setup: write(Setup(**setup)),
        "read": lambda setup: read(Setup(**setup)),
        "conform": lambda setup: conform(**setup),
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
