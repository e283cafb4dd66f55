"""`kvtier bench hit-ratio`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import csv
import json

import pytest

import kvtier.cli
from tests.bench.traces import conversations, mooncake_rows, write_lines


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    return write_lines(path, mooncake_rows(conversations(4, requests=200)))


@pytest.fixture
def bench(capsys, monkeypatch):
    monkeypatch.delenv("KVTIER_TRACES", raising=False)

    def run(*words, code=0):
        assert kvtier.cli.main(["bench", "hit-ratio", *map(str, words)]) == code
        return capsys.readouterr()

    return run


def refused(result):
    assert result.out == ""
    error, remedy = result.err.splitlines()
    assert error.startswith("error: ")
    assert remedy.startswith("remedy: ")
    return error


def test_one_file_gives_a_table_and_a_sentence(bench, trace):
    out = bench(trace).out
    lines = out.splitlines()
    assert lines[0].startswith("trace: mooncake, 200 requests of ")
    assert lines[-1].startswith("With ")
    assert "the hit ratio is " in lines[-1]
    rows = [line.split() for line in lines if line.startswith("lru ")]
    assert len(rows) == 8
    # The smallest size that comes close to the best one is the answer.
    ratios = [float(row[4]) for row in rows]
    size = rows[next(at for at, ratio in enumerate(ratios) if ratio >= 0.95 * ratios[-1])][3]
    assert lines[-1].startswith(f"With {size} of host memory, under LRU, the hit ratio is ")
    assert "an engine's own radix cache" in out


def test_json_has_all_that_a_figure_depends_on(bench, trace):
    words = (trace, "--tiers", "gpu=5%,host=20%,nvme=50%", "--policy", "lru,arc")
    report = json.loads(bench(*words, "--write", "back,through", "--json").out)
    assert report["definitions"]["cold"]
    assert [(row["policy"], row["write"]) for row in report["results"]] == [
        ("lru", "back"), ("arc", "back"), ("lru", "through"), ("arc", "through"),
    ]  # fmt: skip
    for row in report["results"]:
        ratio = row["hit_ratio"]["cold"]
        assert ratio == pytest.approx(sum(tier["hit_ratio"] for tier in row["tiers"].values()))
        assert ratio == pytest.approx(row["same_session"] + row["cross_session"])
        assert row["prefill_speedup_ideal"] == pytest.approx(1 / (1 - ratio))
        assert row["gap_to_optimum"] >= 0
        assert row["optimum"]["cold"] <= report["trace"]["ceiling"]["cold"]
        assert list(row["tiers"]) == ["gpu", "host", "nvme"]


def test_sizes_in_bytes_need_a_model(bench, trace):
    assert "no model says" in refused(bench(trace, "--tiers", "host=1GiB", code=2))
    one = json.loads(bench(trace, "--tiers", "host=1GiB", "--model", "llama-3.1-8b", "--json").out)
    tier = one["results"][0]["tiers"]["host"]
    assert tier["capacity_tokens"] == 2**30 // 131_072 // 512 * 512
    assert tier["capacity_bytes"] == tier["capacity_tokens"] * 131_072
    words = ("--tiers", "host=1GiB", "--model", "llama-3.1-8b", "--kv-dtype", "fp8", "--json")
    packed = json.loads(bench(trace, *words).out)["results"][0]["tiers"]["host"]
    assert packed["capacity_tokens"] == 2 * tier["capacity_tokens"]


def test_one_pass_gives_the_same_figures(bench, trace):
    pytest.importorskip("numba", reason="numba is in the extra [fast]")
    words = (trace, "--capacities", "5%,20%,60%", "--json")
    replayed, at_once = (
        json.loads(bench(*words, *more).out)["results"] for more in ((), ("--one-pass",))
    )
    assert at_once == replayed
    assert "not by the daemon's code" in bench(trace, "--one-pass").out
    assert "one pass is for LRU" in refused(bench(trace, "--one-pass", "--policy", "arc", code=2))


def test_csv(bench, trace, tmp_path):
    out = tmp_path / "out.csv"
    bench(trace, "--tiers", "gpu=5%,host=20%", "--csv", out)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["tier"] for row in rows] == ["gpu", "host", "all"]
    parts = [float(row["hit_ratio"]) for row in rows[:2]]
    assert float(rows[2]["cold"]) == pytest.approx(sum(parts))


@pytest.mark.leaks_allowed("matplotlib keeps the files of its fonts open")
@pytest.mark.parametrize("name", ["out.png", "out.svg"])
def test_plot(bench, trace, tmp_path, name):
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra [bench]")
    bench(trace, "--plot", tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000


def test_a_plot_without_matplotlib_names_the_extra(bench, trace, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = bench(trace, "--plot", tmp_path / "out.png", code=1)
    assert result.err.splitlines()[1] == "remedy: pip install 'kvtier[bench]'"
    assert not (tmp_path / "out.png").exists()


def test_traces_are_found_in_their_folder(bench, trace, monkeypatch, tmp_path):
    monkeypatch.setenv("KVTIER_TRACES", str(trace.parent))
    monkeypatch.chdir(tmp_path)
    assert bench("small.jsonl").out.startswith("trace: mooncake")


def test_routers(bench, trace):
    words = ("--tiers", "gpu=10%", "--replicas", 4, "--router", "rr,session,kv", "--shared", "50%")
    report = json.loads(bench(trace, *words, "--json").out)
    assert [row["router"] for row in report["results"]] == ["rr", "session", "kv"]
    for row in report["results"]:
        parts = row["hit_ratio_local"] + row["hit_ratio_shared"]
        assert row["hit_ratio"] == pytest.approx(parts)
    out = bench(trace, *words).out
    assert "Service model: a replica prefills 8,000 uncached tokens/s" in out
    assert out.splitlines()[-1].startswith("With 4 replicas of ")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--policy", "lfu"), "policy 'lfu' is not known"),
        (("--write", "never"), "write 'never' is not known"),
        (("--tiers", "disk=3Mtok"), "tiers: 'disk' is none of gpu, host, nvme"),
        (("--tiers", "host"), "tiers: host has no size"),
        (("--tiers", "host=1Mtok,host=2Mtok"), "tiers: host is named twice"),
        (("--tiers", "host=3"), "size '3' is no number with a unit"),
        (("--tiers", "host=3parsec"), "size '3parsec' has an unknown unit 'parsec'"),
        (("--model", "gpt-2"), "model 'gpt-2' is not known"),
        (("--model", "kimi-k2", "--bytes-per-token", "5"), "--bytes-per-token stands beside"),
        (("--bytes-per-token", "0"), "--bytes-per-token is 0"),
        (("--plot", "out.jpg"), "plot: 'out.jpg' ends in none of .png, .svg"),
        (("--router", "kv"), "--router and --shared need --replicas"),
        (("--replicas", "2"), "--replicas needs --tiers gpu=SIZE"),
        (("--replicas", "2", "--tiers", "host=5%"), "with --replicas each has a tier gpu alone"),
        (("--replicas", "0", "--tiers", "gpu=5%"), "--replicas must be from 1"),
        (
            ("--replicas", "2", "--tiers", "gpu=5%", "--affinity-adoption", "1.5"),
            "--affinity-adoption must be from 0 to 1",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(bench, trace, words, what):
    assert what in refused(bench(trace, *words, code=2))


def test_a_malformed_trace_is_refused_with_its_line(bench, trace, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(trace.read_text() + '{"timestamp": 1}\n')
    assert f"{path}:201: no field 'hash_ids'" in refused(bench(path, code=2))
    assert "No such file" in refused(bench(tmp_path / "none", code=2))
