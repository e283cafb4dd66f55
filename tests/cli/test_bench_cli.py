"""`kvtier bench hit-ratio`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import subprocess
import sys

import pytest

import kvtier.cli
import kvtier.cli.bench_hit_ratio
from tests.bench.traces import conversations, mooncake_rows, write_lines

REPLICAS = ("--replicas", "2", "--tiers", "gpu=5%")


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


def test_of_policies_at_one_size_the_sentence_names_the_best(bench, trace):
    for policies in ("arc,s3-fifo", "s3-fifo,arc"):
        words = (trace, "--capacities", "30%", "--policy", policies)
        rows = json.loads(bench(*words, "--json").out)["results"]
        best = max(rows, key=lambda row: row["hit_ratio"]["cold"])
        ratios = [row["hit_ratio"]["cold"] for row in rows]
        assert 0.95 * max(ratios) <= min(ratios) < max(ratios)
        ratio = f"{100 * best['hit_ratio']['cold']:.1f} %"
        sentence = bench(*words).out.splitlines()[-1]
        assert f"under {best['policy'].upper()}, the hit ratio is {ratio}" in sentence


def test_the_optimum_of_several_tiers_says_that_it_is_of_one(bench, trace):
    words = (trace, "--tiers", "gpu=5%,host=20%")
    sentence = bench(*words).out.splitlines()[-1]
    assert "the best policy with all of that in one tier, no page twice, would reach" in sentence
    definitions = json.loads(bench(*words, "--json").out)["definitions"]
    assert "in one tier as large as all together" in definitions["optimum"]
    alone = bench(trace, "--tiers", "host=20%").out.splitlines()[-1]
    assert "the best policy of that size would reach" in alone


def test_starts_are_drawn_as_asked(bench, tmp_path):
    entry = {"t": 0, "in": 64, "out": 1, "hash_ids": [1]}
    path = write_lines(tmp_path / "agents", [{"requests": [entry, entry]}] * 2)
    plain = json.loads(bench(path, "--json").out)["trace"]["notes"]
    assert plain == ["session starts drawn over 8 h (seed 1), idle gaps clipped to 3600 s"]
    words = ("--start-hours", 2, "--gap-max", 60, "--seed", 5, "--json")
    asked = json.loads(bench(path, *words).out)["trace"]["notes"]
    assert asked == ["session starts drawn over 2 h (seed 5), idle gaps clipped to 60 s"]


def test_whose_code_ran_is_said(bench, trace):
    key = "shared_with_the_daemon"
    words = (trace, "--tiers", "gpu=20%", "--json")
    own = json.loads(bench(*words, "--policy", "lru,arc").out)[key]
    assert "the daemon's own policy objects" in own
    assert "textbook" not in own
    both = json.loads(bench(*words, "--policy", "lru,lru,fifo").out)
    assert both[key].endswith(" Not so fifo: of textbooks, in code of their own.")
    assert [row["policy"] for row in both["results"]] == ["lru", "fifo"]


def test_a_policy_that_needs_numba_says_so(bench, trace, monkeypatch):
    monkeypatch.setattr("kvtier.cli.bench_options.without_numba", lambda: "there is none")
    ended = bench(trace, "--policy", "gittins", code=1)
    assert "policy gittins needs numba, which cannot be used: there is none" in ended.err
    assert "kvtier[bench]" in ended.err


_BOTH = """
import sys
import kvtier.cli
given = ["--bytes-per-token", "1000", "--target", "0.4", "--prices", "host=3"]
print(kvtier.cli.main(["bench", "advise", sys.argv[1], *given]))
print(kvtier.cli.main(["bench", "hit-ratio", sys.argv[1], "--policy", "gittins"]))
"""


def test_a_compiler_that_is_turned_off_is_done_without_or_named(tmp_path):
    """In a process of its own, as numba is told when it is loaded."""
    pytest.importorskip("numba", reason="numba is in the extra [fast]")
    small = write_lines(tmp_path / "t.jsonl", mooncake_rows(conversations(4, requests=30)))
    done = subprocess.run(
        [sys.executable, "-c", _BOTH, small],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines[-3].startswith("The cheapest found for 40.0 %")
    assert (lines[-2:], done.returncode) == (["0", "1"], 0)
    error, remedy = done.stderr.splitlines()[-2:]
    assert "policy gittins needs numba, which cannot be used: " in error
    assert "NUMBA_DISABLE_JIT" in remedy


def test_the_sentence_about_routers_keeps_to_one_size(bench, trace):
    words = ("--replicas", 2, "--router", "session", "--tiers", "gpu=5%", "--tiers", "gpu=60%")
    last = bench(trace, *words).out.splitlines()[-1]
    assert last.startswith("With 2 replicas of ")
    assert ";" not in last


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
        (("--block-tokens", "0"), "--block-tokens is 0"),
        (("--start-hours", "-1"), "--start-hours is -1"),
        (("--gap-max", "nan"), "--gap-max is nan"),
        (("--gap-max", "60"), "--start-hours, --gap-max and --seed are for traces of agents"),
        (("--start-hours", "8"), "--start-hours, --gap-max and --seed are for traces of agents"),
        (("--seed", "1"), "--start-hours, --gap-max and --seed are for traces of agents"),
        (("--plot", "out.jpg"), "plot: 'out.jpg' ends in none of .png, .svg, .html"),
        (("--router", "kv"), "--router and --shared need --replicas"),
        (("--router", "rr"), "--router and --shared need --replicas"),
        (("--shared", ""), "--router and --shared need --replicas"),
        (("--affinity-adoption", "0.5"), "--affinity-adoption and --rate need --replicas"),
        (("--rate", "7000"), "--affinity-adoption and --rate need --replicas"),
        (("--write", "back", "--one-pass"), "change nothing with --one-pass"),
        (("--untold", "--one-pass"), "change nothing with --one-pass"),
        (("--policy", "lru,arc", "--one-pass"), "one pass is for LRU and one tier"),
        (("--tiers", "gpu=5%,host=9%", "--one-pass"), "one pass is for LRU and one tier"),
        (("--write", "back"), "--write is about nvme below host"),
        (("--write", "back", "--tiers", "gpu=5%,nvme=9%"), "--write is about nvme below host"),
        (("--untold", "--tiers", "host=5%,nvme=9%"), "--untold is about tiers below gpu"),
        (("--kv-dtype", "fp8"), "--kv-dtype needs --model"),
        (("--model", ""), "model '' is not known"),
        (("--capacities", ""), "size '' is no number with a unit"),
        (("--policy", "lru,fifo", "--tiers", "gpu=5%,host=9%"), "policy fifo is a textbook's"),
        (("--csv", "no/such/out.csv"), "no/such/out.csv: cannot be written"),
        (("--csv", "."), ".: cannot be written"),
        (("--plot", "no/such/out.svg"), "no/such/out.svg: cannot be written"),
        ((*REPLICAS, "--one-pass"), "--one-pass is for one replica"),
        ((*REPLICAS, "--write", "back"), "--write and --untold are for one replica"),
        ((*REPLICAS, "--untold"), "--write and --untold are for one replica"),
        ((*REPLICAS, "--capacities", "5%"), "--capacities is for one replica"),
        ((*REPLICAS, "--csv", "out.csv"), "--csv and --plot are for one replica"),
        ((*REPLICAS, "--affinity-adoption", "0.5"), "--affinity-adoption needs --router session"),
        ((*REPLICAS, "--shared", ""), "size '' is no number with a unit"),
        ((*REPLICAS, "--rate", "inf"), "--rate must be from 0.001 to 1e+12"),
        (("--replicas", "2"), "--replicas needs --tiers gpu=SIZE"),
        (
            ("--replicas", "2", "--tiers", "gpu=5%", "--policy", "gittins"),
            "policy gittins hears of requests, which --replicas does not tell",
        ),
        (("--replicas", "2", "--tiers", "host=5%"), "with --replicas each has a tier gpu alone"),
        (("--replicas", "0", "--tiers", "gpu=5%"), "--replicas must be from 1"),
        (
            ("--replicas", "2", "--tiers", "gpu=5%", "--affinity-adoption", "1.5"),
            "--affinity-adoption must be from 0 to 1",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_replay(bench, trace, words, what, monkeypatch):
    for name in ("replay", "textbook_replay", "one_pass", "route"):
        monkeypatch.delattr(f"kvtier.cli.bench_hit_ratio.{name}")
    assert what in refused(bench(trace, *words, code=2))


ROW = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}


def bad_traces():
    """Name -> bytes; a name with a / lies in a folder, which is the trace."""
    line = json.dumps(ROW).encode() + b"\n"
    session = {"requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [1]}]}
    packed = gzip.compress(random.Random(1).randbytes(4000) + b"\n")
    flipped = bytearray(packed)
    flipped[20:60] = bytes(255 - byte for byte in flipped[20:60])
    deep: dict = session
    for _ in range(70):
        deep = {"requests": [deep]}
    return {
        "short/a.json.gz": packed[:2000],
        "short.gz": packed[:2000],
        "flipped/a.json.gz": bytes(flipped),
        "flipped.gz": bytes(flipped),
        "later/b.json.gz": gzip.compress(json.dumps(session, indent=1).encode())[:-12],
        "digits": line.replace(b'"timestamp": 0', b'"timestamp": ' + b"9" * 400),
        "many digits": line.replace(b'"timestamp": 0', b'"timestamp": ' + b"9" * 5000),
        "text digits": line.replace(b'"timestamp": 0', b'"timestamp": "' + b"9" * 400 + b'"'),
        "no input": json.dumps({**ROW, "input_length": 0, "hash_ids": []}).encode(),
        "deep": json.dumps(deep).encode(),
        "brackets": b"[" * 100_000,
    }


@pytest.mark.parametrize("more", [(), REPLICAS], ids=["alone", "replicas"])
@pytest.mark.parametrize("name", bad_traces())
def test_a_bad_trace_is_two_lines_and_no_traceback(bench, tmp_path, name, more):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bad_traces()[name])
    named = path.parent if "/" in name else path
    assert str(path) in refused(bench(named, *more, code=2))


@pytest.mark.parametrize(
    "words",
    [
        ("--tiers", "gpu=1e400tok"),
        ("--tiers", "gpu=1e400%"),
        ("--tiers", "gpu=1e400B", "--model", "kimi-k2"),
        ("--tiers", "gpu=1e308GiB", "--model", "kimi-k2"),
        ("--capacities", "9e18Gtok"),
        ("--capacities", "9e18Gtok", "--one-pass"),
        ("--bytes-per-token", "9" * 400),
        ("--block-tokens", "9" * 400),
        ("--start-hours", "1e400"),
        ("--replicas", "9" * 400, "--tiers", "gpu=5%"),
        ("--replicas", "2", "--policy", "fifo", "--tiers", "gpu=5%"),
        ("--replicas", "2", "--tiers", "gpu=5%", "--shared", "1e400tok"),
        ("--replicas", "2", "--tiers", "gpu=5%", "--rate", "1e-400"),
    ],
)
def test_numbers_out_of_range_are_two_lines_and_no_traceback(bench, trace, words):
    refused(bench(trace, *words, code=2))


def test_a_malformed_trace_is_refused_with_its_line(bench, trace, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(trace.read_text() + '{"timestamp": 1}\n')
    assert f"{path}:201: no field 'hash_ids'" in refused(bench(path, code=2))
    assert "No such file" in refused(bench(tmp_path / "none", code=2))
