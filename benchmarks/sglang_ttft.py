"""Time to the first token of a long prompt on SGLang's real server, from each place that it can
come from, beside computing it.

    python -m benchmarks.sglang_ttft [--quick] [--rounds 3] [--dir DIR] [--json FILE]

SmolLM2-135M in float32 on the CPU, one request at a time, answered with one token: the time is that
of the whole request, over HTTP. A round is one prompt under a salt of its own: computed; again,
from the device; after two others of its length have pushed it out there, from SGLang's host pool;
after /flush_cache, from kvtier's host memory; after that and a restart of the daemon, from its NVMe
tier. Each answer says where its tokens came from, and a round in which one came from elsewhere is
an error. The prompts that push it out are computed, too, and are part of the reference.

Ratios are of one round; the table has their median, the lowest and the highest. It says nothing of
a GPU, where computing is faster and copies go over a bus.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tokenizers import Tokenizer

import kvtier
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Bound, Missing, Row, Target
from kvtier.core.page import Tier
from kvtier.testing.daemon_process import DaemonProcess
from kvtier_engine.smollm2 import ensure_model
from tests.sglang.environment import ENVIRONMENT
from tests.sglang.server_rig import PAGE, Answer, Server, extra_config, storable

__all__ = ["PLACES", "Round", "rows"]

TOKENS, QUICK_TOKENS = 1500, 200
SENTENCE = "The keeper of the lighthouse wrote in his journal what the sea had brought. "
#: Room on the device for one prompt, not for two.
DEVICE_TOKENS, QUICK_DEVICE_TOKENS = 2048, 304
FIRST_TOKEN = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
WAIT_S = 120.0
TARGET = Target(bound=Bound.AT_MOST, number=0.5)
#: Where a prompt comes from, and what SGLang calls that.
PLACES = {
    "device": ("device", "SGLang's device pool"),
    "pool": ("host", "SGLang's host pool"),
    "host": ("storage", "kvtier's host memory"),
    "nvme": ("storage", "kvtier's NVMe tier, first read after a restart of the daemon"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Milliseconds to the first token, `computed` and from each of PLACES."""

    computed: float
    found: dict[str, float]


class Rig:
    """A server on a daemon, and the text of a prompt, which is another one under another salt."""

    def __init__(self, server: Server, daemon: DaemonProcess, text: str) -> None:
        self._server = server
        self._daemon = daemon
        self._text = text

    def round(self, number: int) -> Round:
        salt = f"round {number}"
        found: dict[str, float] = {}
        there = self._status_of(Tier.NVME)
        first = self._ask(salt)
        _check(first, None)
        found["device"] = _ms(self._ask(salt), "device")
        pages = 2 * storable(first) // PAGE  # K and V
        _until(lambda: self._status_of(Tier.NVME) >= there + pages, "the pages did not get to NVMe")
        computed = [first]
        for other in ("first", "second"):
            computed.append(self._ask(f"{salt}, the {other} other"))
            _check(computed[-1], None)
        found["pool"] = _ms(self._ask(salt), "pool")
        self._server.flush()
        found["host"] = _ms(self._ask(salt), "host")
        self._server.flush()
        self._restart(number)
        before = self._counter("hit_nvme")
        found["nvme"] = _ms(self._ask(salt), "nvme")
        _until(lambda: self._counter("hit_nvme") - before >= pages, "the pages were not on NVMe")
        self._server.flush()
        return Round(computed=fmean(some.seconds for some in computed) * 1e3, found=found)

    def _ask(self, salt: str) -> Answer:
        return self._server.generate(self._text, sampling_params=FIRST_TOKEN, cache_salt=salt)

    def _restart(self, number: int) -> None:
        """And until the server has found it again, by a prompt of its own."""
        self._daemon.kill()
        self._daemon.start()

        def is_back() -> bool:
            answer = self._server.generate(f"A keeper wrote {number}. " * 12)
            self._server.flush()
            return set(answer.found) == {"storage"}

        _until(is_back, "the server did not find the daemon again")

    def _status_of(self, tier: Tier) -> int:
        return next(found.pages_sealed for found in self._status().tiers if found.tier is tier)

    def _counter(self, name: str) -> int:
        return self._status().counters.get(name, 0)

    def _status(self) -> Any:
        with kvtier.connect(self._daemon.url, deadline=10) as kv:
            return kv.status(deadline=10)


def rows(plan: Plan) -> Iterator[Measured]:
    if not (ENVIRONMENT / ".installed").exists():
        yield Missing(name="sglang-ttft/", reason="no SGLang: make sglang-env")
        return
    model = ensure_model().directory
    tokens = plan.sized(TOKENS, QUICK_TOKENS)
    with (
        tempfile.TemporaryDirectory(prefix="kvt-") as base,
        tempfile.TemporaryDirectory(prefix="kvt-", dir=plan.directory) as device,
    ):
        daemon = DaemonProcess(
            Path(base), f"nvme.paths={device}/nv", "host.bytes=1GiB", "nvme.bytes=4GiB",
            "nvme.write_policy=through",
        )  # fmt: skip
        with daemon:
            progress("sglang-ttft: a server starts")
            extra = extra_config(daemon.url)
            on_device = str(plan.sized(DEVICE_TOKENS, QUICK_DEVICE_TOKENS))
            options = {"max_total_tokens": on_device, "hicache_ratio": "4"}
            with Server(model, Path(base) / "log", extra, **options) as server:
                rig = Rig(server, daemon, text_of(model, tokens))
                rig.round(0)  # what is loaded and compiled once
                measured = []
                for number in range(1, plan.rounds(3) + 1):
                    progress(f"sglang-ttft: round {number}")
                    measured.append(rig.round(number))
    for place, (_, what) in PLACES.items():
        yield Row.of_pairs(
            f"sglang-ttft/{place}",
            f"time to first token of {tokens:,} tokens, SmolLM2-135M on the CPU, from {what}",
            [(some.found[place], some.computed) for some in measured],
            "ms",
            "computing it",
            target=TARGET,
        )


def text_of(model: Path, tokens: int) -> str:
    """Sentences of so many tokens in all."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return str(tokenizer.decode(tokenizer.encode(SENTENCE * tokens).ids[:tokens]))


def _ms(answer: Answer, place: str) -> float:
    _check(answer, PLACES[place][0])
    return answer.seconds * 1e3


def _check(answer: Answer, source: str | None) -> None:
    wanted = {} if source is None else {source: storable(answer)}
    if answer.found != wanted:
        raise RuntimeError(f"tokens came from {answer.found}, and should have from {wanted}")


def _until(holds: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > ends:
            raise RuntimeError(what)
        time.sleep(0.05)


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("Time to first token", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
