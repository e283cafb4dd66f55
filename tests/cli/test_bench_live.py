"""`kvtier bench hit-ratio --live`: a trace against a real daemon, beside its replay."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest

import kvtier.bench.live
import kvtier.cli
import kvtier.cli.bench_live
from kvtier.bench.formats import read_trace
from kvtier.bench.live import LiveOptions, run_live
from tests.bench.traces import conversations, mooncake_rows, write_lines
from tests.forks import ForkedDaemon


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    return write_lines(path, mooncake_rows(conversations(4, requests=60)))


@pytest.fixture
def small(forker):
    """Makes a daemon with room for few pages."""
    made = []

    def make(*settings):
        base = Path(tempfile.mkdtemp(prefix="kvt-"))
        made.append((base, ForkedDaemon(forker, base, "host.bytes=1MiB", *settings)))
        return made[-1][1].start()

    yield make
    for base, daemon in made:
        daemon.close()
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def live(capsys, monkeypatch, trace):
    monkeypatch.delenv("KVTIER_TRACES", raising=False)

    def run(daemon, *words, code=0):
        url = getattr(daemon, "url", daemon)
        given = ["bench", "hit-ratio", trace, "--live", url, "--page-bytes", "8KiB", *words]
        assert kvtier.cli.main([*map(str, given)]) == code
        return capsys.readouterr()

    return run


def test_the_daemon_finds_what_the_replay_finds(live, small):
    daemon = small()
    report = json.loads(live(daemon, "--json").out)
    # 1 MiB in records of 8 KiB and a header.
    assert report["simulated"]["pages"] == {"host": 85}
    assert report["difference_points"] == pytest.approx(0.0, abs=0.5)
    assert 0.1 < report["hit_ratio"] < 0.9
    assert report["is_within_tolerance"] is True
    assert report["pages_wrong"] == 0
    assert report["pages_checked"] == report["outcomes"]["get HIT"] > 100
    assert report["get"]["bytes"] == report["pages_checked"] * 8192
    assert report["get"]["p50_s"] <= report["get"]["p95_s"] <= report["get"]["p99_s"]
    # A second run begins cold: the first one has left nothing behind.
    again = live(daemon).out.splitlines()
    assert again[-1].startswith("The daemon found ")
    assert "within the tolerance of 0.5" in again[-1]


def test_with_nvme_below(live, small, tmp_path):
    nvme = Path(tempfile.mkdtemp(prefix="kvt-"))
    try:
        daemon = small(f"nvme.paths={nvme}", "nvme.bytes=32MiB", "nvme.write_policy=through")
        report = json.loads(live(daemon, "--write", "through", "--json").out)
        assert set(report["simulated"]["pages"]) == {"host", "nvme"}
        assert report["is_within_tolerance"] is True
        assert report["hit_ratio_nvme_blocks"] > 0
    finally:
        shutil.rmtree(nvme, ignore_errors=True)


def test_shared_memory_gives_right_bytes_and_no_verdict_on_a_short_run(live, small):
    report = json.loads(live(small(), "--plane", "auto", "--json").out)
    assert report["pages_wrong"] == 0
    assert report["pages_checked"] > 0
    if report["plane"] == "shared memory":
        assert report["is_within_tolerance"] is None


def test_requests_come_at_their_time(live, small):
    report = json.loads(live(small(), "--requests", 11, "--speedup", 20, "--json").out)
    assert report["requests"] == 11
    assert report["wall_s"] >= 10 / 20  # a request a second


class _Killer:
    """In place of the progress bar: ends the daemon after some requests."""

    daemon: ForkedDaemon

    def __init__(self, what, total, *, unit):
        self._is_live = what == "live"

    def at(self, done):
        if self._is_live and done == 20:
            os.kill(self.daemon.pid, signal.SIGKILL)

    def end(self):
        pass


def test_a_daemon_that_is_killed_ends_the_run_with_the_numbers_so_far(live, small, monkeypatch):
    _Killer.daemon = small()
    monkeypatch.setattr(kvtier.cli.bench_live, "ProgressBar", _Killer)
    ended = live(_Killer.daemon, "--json", code=1)
    report = json.loads(ended.out)
    assert report["requests"] == 21
    assert report["pages_checked"] > 0
    assert "UNAVAILABLE" in report["ended"]
    error, remedy = ended.err.splitlines()
    assert error.startswith("error: after 21 of 60 requests: the daemon stopped serving: ")
    assert remedy.startswith("remedy: ")


def test_a_daemon_that_hangs_ends_the_run_at_the_deadline(small, trace):
    daemon = small()

    def stop(done):
        if done == 20:
            os.kill(daemon.pid, signal.SIGSTOP)

    options = LiveOptions(url=daemon.url, page_bytes=8192, deadline_s=0.5)
    try:
        done = run_live(read_trace(trace), options, stop)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert done.requests == 21
    assert done.ended is not None
    assert done.ended.startswith("the daemon stopped serving: ")


def test_a_wrong_page_is_found(live, small, monkeypatch):
    words, calls = kvtier.bench.live._word, iter(range(1_000_000))

    def odd_later(key):
        return words(key) ^ np.uint64(next(calls) > 300)

    monkeypatch.setattr(kvtier.bench.live, "_word", odd_later)
    ended = live(small(), code=1)
    assert " WRONG, first " in ended.out


def test_no_daemon_is_two_lines(live, tmp_path):
    ended = live(f"unix://{tmp_path}/none.sock", code=1)
    assert ended.out == ""
    assert ended.err.splitlines()[0].startswith("error: ")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--tiers", "gpu=5%"), "--live has the daemon's own tiers"),
        (("--replicas", "2"), "--live has the daemon's own tiers"),
        (("--page-bytes", "1000"), "--page-bytes"),
        (("--page-bytes", "lots"), "--page-bytes"),
        (("--speedup", "-1"), "--speedup must be from 0"),
        (("--speedup", "nan"), "--speedup must be from 0"),
        (("--requests", "0"), "--requests must be 1 or more"),
        (("--policy", "gittins"), "policy gittins is not one of the daemon's"),
        (("--write", "never"), "--write is none of back, through, selective"),
        (("--csv", "out.csv"), "--csv changes nothing with --live"),
        (("--ttl", "5"), "--ttl changes nothing with --live"),
        (("--price-cached", "0"), "--price-cached changes nothing with --live"),
        (("--model", "kimi-k2"), "--model changes nothing with --live"),
    ],
)
def test_what_makes_no_sense_is_refused(live, words, what):
    ended = live("unix:///nowhere", *words, code=2)
    assert ended.out == ""
    assert what in ended.err.splitlines()[0]
