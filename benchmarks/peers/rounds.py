"""How a peer's process is asked to measure, so that its rounds are in turn with kvtier's.

It writes one JSON line when it is ready, with its version; for every line on its stdin it measures
one round and writes one JSON line of numbers: name -> GB/s (`put-1`, `get-32`: the number is pages
a call), or microseconds for names that end in `-us`. It ends when stdin does. Whatever else is
written to stdout meanwhile, by libraries too, goes to stderr.

Imported in the peers' environments: the standard library alone. One thread.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

__all__ = ["PAGE_BYTES", "answers", "ending", "gbps", "microseconds", "serve"]

PAGE_BYTES = 2 << 20


def answers() -> TextIO:
    """The stdout that this process was started with, for answers alone. To be called first."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w")


@contextmanager
def ending() -> Iterator[None]:
    """Ends the process with the block: threads of a library may not end by themselves. An error in
    the block is shown, and makes the exit status 1.
    """
    status = 1
    try:
        yield
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)


def serve(out: TextIO, version: str, measure: Callable[[int], Mapping[str, float]]) -> None:
    """Answers until stdin ends."""
    _write(out, {"version": version})
    for number, _ in enumerate(sys.stdin):
        _write(out, measure(number))


def _write(out: TextIO, answer: Mapping[str, object]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def gbps(work: Callable[[], object], nbytes: int) -> float:
    began = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - began) / 1e9


def microseconds(work: Callable[[], object], calls: int) -> float:
    """A call, of `calls` in `work`."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) / calls * 1e6
