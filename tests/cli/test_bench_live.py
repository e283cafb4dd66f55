"""`kvtier bench hit-ratio --live`: a trace against a real daemon, beside its replay."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import kvtier
import kvtier.cli
import kvtier.cli.bench_live
from kvtier.bench.formats import read_trace
from kvtier.bench.live import LiveOptions, run_live
from kvtier.client import Connection, GetResult, Namespace
from kvtier.core.page import GetCode
from kvtier.errors import DaemonUnavailable
from tests.bench.traces import build, conversations, mooncake_rows, write_lines
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
    assert _namespaces(daemon) == 0


def test_with_nvme_below(live, small, tmp_path):
    nvme = Path(tempfile.mkdtemp(prefix="kvt-"))
    try:
        daemon = small(f"nvme.paths={nvme}", "nvme.bytes=32MiB", "nvme.write_policy=through")
        report = json.loads(live(daemon, "--write", "through", "--json").out)
        assert set(report["simulated"]["pages"]) == {"host", "nvme"}
        assert report["is_within_tolerance"] is True
        assert report["tiers"]["nvme"]["hit_ratio"] > 0.05
    finally:
        shutil.rmtree(nvme, ignore_errors=True)


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is in the extra [fast]")
def test_shared_memory_gives_right_bytes_and_no_verdict_on_a_short_run(live, small):
    report = json.loads(live(small(), "--plane", "auto", "--json", code=3).out)
    assert report["plane"] == "shared memory"
    assert report["pages_wrong"] == 0
    assert report["pages_checked"] == report["outcomes"]["get HIT"] > 100
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
    assert report["not_deleted"]
    warning, error, remedy = ended.err.splitlines()
    assert warning.startswith("warning: the pages of this run are still there: ")
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
    assert done.not_deleted is not None or not _namespaces(daemon)
    assert done.requests == 21
    assert done.ended is not None
    assert done.ended.startswith("the daemon stopped serving: ")


def _nothing(real, out):
    """A get that says HIT and writes nothing."""


def _half(real, out):
    """A get that has written the first half of the first page."""
    out[0, : out.shape[1] // 2] = real[0, : out.shape[1] // 2]
    out[1:] = real[1:]


def _neighbour(real, out):
    """A get that has mixed up two pages."""
    out[:] = real[[1, 0, *range(2, len(real))] if len(real) > 1 else [0]]


def _last_byte(real, out):
    """A get that has not written the last byte of a page."""
    out[:, :-1] = real[:, :-1]
    out[1:] = real[1:]


@pytest.mark.parametrize(
    ("reads", "wrong"), [(_nothing, 40), (_half, 4), (_neighbour, 8), (_last_byte, 4)]
)
def test_a_get_that_reads_wrongly_is_found(small, monkeypatch, reads, wrong):
    """One prompt of ten pages five times: what the buffer held before is what should be read."""
    get = Namespace.get

    def bad(self, keys, *, out):
        real = np.zeros_like(out)
        found = get(self, keys, out=real)
        if found.prefix:
            reads(real, out)
        return found

    monkeypatch.setattr(Namespace, "get", bad)
    trace = build([(0, list(range(10)))] * 5)
    done = run_live(trace, LiveOptions(url=small().url, page_bytes=8192))
    assert (done.pages_checked, done.wrong) == (40, wrong)
    assert done.pages_stored == 10


def test_a_hit_behind_a_page_that_is_not_there_is_checked_too(small, monkeypatch):
    get, reasons = Namespace.get, GetResult.reasons.fget

    def bad(self, keys, *, out):
        found = get(self, keys, out=out)
        out[-1] = 0
        return found

    def hole(self):
        found = reasons(self)
        return [GetCode.MISS, *found[1:]]

    monkeypatch.setattr(Namespace, "get", bad)
    monkeypatch.setattr(GetResult, "reasons", property(hole))
    trace = build([(0, list(range(10)))] * 2)
    done = run_live(trace, LiveOptions(url=small().url, page_bytes=8192))
    assert (done.pages_checked, done.wrong) == (9, 1)


def test_wrong_bytes_are_exit_code_1(live, small, monkeypatch):
    get = Namespace.get

    def bad(self, keys, *, out):
        return get(self, keys, out=np.zeros_like(out))

    monkeypatch.setattr(Namespace, "get", bad)
    assert " WRONG, first " in live(small(), code=1).out


@pytest.mark.parametrize("code", [GetCode.CORRUPT, GetCode.IO_ERROR])
def test_a_page_that_is_damaged_is_exit_code_1(live, small, monkeypatch, code):
    reasons, calls = GetResult.reasons.fget, iter(range(1_000_000))

    def damaged(self):
        found = reasons(self)
        return [code, *found[1:]] if next(calls) == 30 else found

    monkeypatch.setattr(GetResult, "reasons", property(damaged))
    report = json.loads(live(small(), "--json", code=1).out)
    assert report["pages_faulty"] == 1
    assert report["is_within_tolerance"] is True


def _namespaces(daemon):
    with kvtier.connect(daemon.url, deadline=30) as connection:
        return len(connection.status().namespaces)


@pytest.mark.parametrize("call", ["get", "put", "between"])
def test_an_interrupted_run_leaves_no_namespace(small, trace, monkeypatch, call):
    daemon, calls = small(), iter(range(1_000_000))

    def interrupted(*_given, **_named):
        if next(calls) == 5:
            assert _namespaces(daemon) == 1
            signal.raise_signal(signal.SIGINT)

    if call != "between":
        real = getattr(Namespace, call)
        monkeypatch.setattr(
            Namespace, call, lambda *given, **named: (interrupted(), real(*given, **named))[1]
        )
    told = interrupted if call == "between" else None
    with pytest.raises(KeyboardInterrupt):
        run_live(read_trace(trace), LiveOptions(url=daemon.url, page_bytes=8192), told)
    assert _namespaces(daemon) == 0


def test_a_namespace_that_cannot_be_deleted_is_said_and_ends_nothing(live, small, monkeypatch):
    def fails(*_given, **_named):
        raise DaemonUnavailable("no answer", remedy="none")

    daemon = small()
    monkeypatch.setattr(Connection, "delete_namespace", fails)
    ended = live(daemon, "--json")
    report = json.loads(ended.out)
    assert report["ended"] is None
    assert report["requests"] == 60
    assert "no answer" in report["not_deleted"]
    assert ended.err.startswith("warning: the pages of this run are still there: ")


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
        (("--policy", "gittins"), "--live compares lru, arc, s3-fifo alone: --policy gittins"),
        (("--write", "never"), "--write is none of back, through, selective"),
        (("--csv", "out.csv"), "--csv changes nothing with --live"),
        (("--ttl", "5"), "--ttl changes nothing with --live"),
        (("--put-ttl", "5"), "--put-ttl changes nothing with --live"),
        (("--price-cached", "0"), "--price-cached changes nothing with --live"),
        (("--model", "kimi-k2"), "--model changes nothing with --live"),
    ],
)
def test_what_makes_no_sense_is_refused(live, words, what):
    ended = live("unix:///nowhere", *words, code=2)
    assert ended.out == ""
    assert what in ended.err.splitlines()[0]
