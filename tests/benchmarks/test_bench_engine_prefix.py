"""What the time of a process of its own is made of, and when it is none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import benchmarks
from benchmarks import engine_prefix

CHILD = """
import json, torch
print("first", flush=True)
threads = torch.get_num_threads() + {more}
print(json.dumps(dict(cached=3, threads=threads, pool=4, weights=5, resident=6, peak=7)))
"""


class SlowDaemon:
    """Takes so many seconds to start, by the clock of the benchmark."""

    url = "unix:///nowhere"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self._seconds, self._passed = seconds, 0.0
        monkeypatch.setattr(engine_prefix, "monotonic", lambda: time.monotonic() + self._passed)

    def start(self) -> None:
        self._passed += self._seconds


def test_a_restart_is_timed_from_the_start_of_the_daemon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine_prefix, "_CHILD", CHILD.format(more=0))
    daemon = SlowDaemon(monkeypatch, 10_000.0)
    child = engine_prefix.restarted(daemon, tmp_path, [1, 2])
    assert child.seconds >= 10_000
    assert (child.cached, child.peak) == (3, 7)


def test_a_process_with_other_threads_is_no_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine_prefix, "_CHILD", CHILD.format(more=1))
    here = torch.get_num_threads()
    with pytest.raises(RuntimeError, match=f"{here + 1} threads there, {here} here"):
        engine_prefix.started(tmp_path, [1], "")


@pytest.mark.parametrize(
    ("child", "limit", "what"),
    [
        ("", "FIRST_TOKEN_SECONDS_MAX", "no first token"),
        ("print('first', flush=True)", "END_SECONDS_MAX", "not ended"),
    ],
    ids=["before", "after"],
)
def test_a_process_that_hangs_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, child: str, limit: str, what: str
) -> None:
    monkeypatch.setattr(engine_prefix, "_CHILD", f"{child}\nimport time; time.sleep(1000)")
    monkeypatch.setattr(engine_prefix, limit, 0.2)
    with pytest.raises(RuntimeError, match=what):
        engine_prefix.started(tmp_path, [1], "")


@pytest.mark.parametrize("name", ["engine_decode", "engine_kv", "engine_prefix", "tag_step"])
def test_no_side_of_a_comparison_gets_fewer_threads(name: str) -> None:
    text = (Path(benchmarks.__path__[0]) / f"{name}.py").read_text(encoding="utf-8")
    assert "set_num_threads" not in text
