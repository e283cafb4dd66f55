"""`kvtier bench compare` and `advise`, and prices in `hit-ratio`: what they print and refuse."""

from __future__ import annotations

import json
import os

import pytest

import kvtier.cli
import kvtier.cli.bench_advise
from tests.bench.traces import conversations, mooncake_rows, write_lines

MODEL = ("--bytes-per-token", "1000")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    return write_lines(path, mooncake_rows(conversations(4, requests=120)))


@pytest.fixture
def bench(capsys, monkeypatch):
    monkeypatch.delenv("KVTIER_TRACES", raising=False)

    def run(*words, code=0):
        assert kvtier.cli.main(["bench", *map(str, words)]) == code
        return capsys.readouterr()

    return run


def refused(result):
    assert result.out == ""
    error, remedy = result.err.splitlines()
    assert error.startswith("error: ")
    assert remedy.startswith("remedy: ")
    return error


@pytest.fixture
def results(bench, trace, tmp_path):
    found = []
    for policy in ("lru", "arc"):
        words = ("--capacities", "20%,50%", "--policy", policy, "--json")
        path = tmp_path / f"{policy}.json"
        path.write_text(bench("hit-ratio", trace, *words).out)
        found.append(path)
    return found


def test_compare(bench, results):
    a, b = results
    out = bench("compare", a, b).out.splitlines()
    assert out[0].split()[:3] == ["row", "A", "B"]
    assert out[-1].startswith("B finds ")
    report = json.loads(bench("compare", a, b, "--json").out)
    first, second = (json.loads(path.read_text())["results"] for path in results)
    points = [row["points"]["cold"] for row in report["rows"]]
    assert points == pytest.approx([
        100 * (two["hit_ratio"]["cold"] - one["hit_ratio"]["cold"])
        for one, two in zip(first, second, strict=True)
    ])  # fmt: skip
    most = max(points, key=abs)
    assert f"{abs(most):.2f} points {'more' if most > 0 else 'less'} than A" in out[-1]
    same = bench("compare", a, a).out
    whole = "All 2 rows have the same hit ratio, and the same of every other ratio."
    assert same.splitlines()[-1] == whole


def test_compare_calls_nothing_the_same_that_is_not(bench, results, tmp_path):
    a, b, other = results[0], tmp_path / "b.json", json.loads(results[0].read_text())
    row = other["results"][1]
    row["tiers"]["host"]["hit_ratio"] -= 0.05
    b.write_text(json.dumps(other))
    last = bench("compare", a, b).out.splitlines()[-1]
    assert last.startswith("All 2 rows have the same hit ratio, but not all other ratios: host ")
    assert "differs by 5.00 points (lru, host=" in last
    # Rows of one name: the change in the first of them is not lost.
    other["results"][1] = json.loads(json.dumps(other["results"][0]))
    a = tmp_path / "a.json"
    a.write_text(json.dumps(other))
    other["results"][0]["hit_ratio"]["cold"] += 0.1
    b.write_text(json.dumps(other))
    assert bench("compare", a, b).out.splitlines()[-1].startswith("B finds 10.00 points more")


def test_compare_refuses_what_is_no_result_by_name(bench, results, trace):
    assert str(trace) in refused(bench("compare", results[0], trace, code=2))
    assert "none.json" in refused(bench("compare", "none.json", results[0], code=2))


def test_advise_is_a_table_and_a_sentence(bench, trace):
    words = (trace, *MODEL, "--target", "0.6", "--prices", "host=3,nvme=0.1")
    out = bench("advise", *words).out.splitlines()
    assert out[1].startswith("host=")
    assert out[-1].startswith("The cheapest found for 60.0 % of input tokens: ")
    report = json.loads(bench("advise", *words, "--json").out)
    assert report["sentence"] == out[-1]
    costs = [choice["cost"] for choice in report["choices"]]
    assert costs == sorted(costs)
    assert all(choice["hit_ratio"] >= 0.6 for choice in report["choices"])
    # What it found is what the bench finds.
    tiers = report["choices"][0]["tiers"]
    text = ",".join(f"{name}={tier['bytes']}B" for name, tier in tiers.items())
    again = json.loads(bench("hit-ratio", trace, *MODEL, "--tiers", text, "--json").out)
    ratio = again["results"][0]["hit_ratio"]["cold"]
    assert ratio == pytest.approx(report["choices"][0]["hit_ratio"])


def test_advise_calls_sizes_the_smallest_only_where_that_is_known(bench, trace):
    words = (trace, *MODEL, "--target", "0.5", "--json")
    for more, is_sure in (
        (("--prices", "host=3"), True),
        (("--prices", "host=3", "--policy", "arc"), False),
        (("--prices", "host=3,nvme=0.1"), False),
    ):
        basis = json.loads(bench("advise", *words, *more).out)["basis"]
        assert ("smallest within 2 %" in basis) is is_sure
        assert ("smallest found" in basis) is not is_sure


def test_a_target_above_the_ceiling_is_said_without_a_replay(bench, trace, monkeypatch):
    monkeypatch.delattr("kvtier.cli.bench_advise.replay")
    words = (trace, *MODEL, "--target", "0.999", "--prices", "host=3")
    out = bench("advise", *words, code=1).out
    assert out.startswith("No size reaches 99.9 %: ")
    assert "(the ceiling)" in out


def test_a_bound_that_is_too_low_is_said(bench, trace):
    words = (trace, *MODEL, "--target", "0.6", "--prices", "host=3", "--at-most", "host=5%")
    out = bench("advise", *words, code=1).out
    assert out.startswith("Nothing that may be bought reaches 60.0 %")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--target", "0"), "target 0 is not above 0"),
        (("--target", "nan"), "target nan is not above 0"),
        (("--target-gpu", "2"), "target 2 is not above 0"),
        (("--prices", "host=x"), "the price of host is 'x'"),
        (("--prices", "disk=1"), "tiers: 'disk' is none of"),
        (("--policy", "gittins-bypass"), "policy 'gittins-bypass' is not known"),
        (("--write", "never"), "write 'never' is not known"),
        (("--have", "host=5%"), "all that has a price is there already"),
        (("--prices", "nvme=1", "--have", "nvme=5%"), "nvme without host memory"),
        (("--prices", "nvme=1"), "nvme without host memory"),
        (("--prices", "gpu=0,host=3"), "gpu has a price and no target"),
        (
            ("--prices", "host=3,nvme=0.1", "--have", "host=5%"),
            "host has a price and is there already",
        ),
        (("--at-most", "nvme=5%"), "--at-most nvme: it is not bought"),
        (
            ("--prices", "nvme=1", "--have", "host=5%", "--at-most", "host=5%"),
            "--at-most host: it is not bought",
        ),
        (("--at-most", "host"), "tiers: host has no size"),
    ],
)
def test_what_makes_no_sense_is_refused(bench, trace, words, what):
    plain = ("--target", "0.6", "--prices", "host=3", *MODEL)
    assert what in refused(bench("advise", trace, *plain, *words, code=2))


def test_prices_of_memory_need_a_model(bench, trace):
    words = ("--target", "0.6", "--prices", "host=3")
    assert "no model says how many bytes" in refused(bench("advise", trace, *words, code=2))


def test_what_a_million_tokens_cost(bench, trace):
    prices = ("--price-cached", "0.1", "--price-uncached", "1", "--json")
    words = ("hit-ratio", trace, "--tiers", "gpu=20%", *prices)
    (row,) = json.loads(bench(*words).out)["results"]
    cold = row["hit_ratio"]["cold"]
    assert row["cost_per_million"] == pytest.approx(0.1 * cold + (1 - cold))
    (row,) = json.loads(bench(*words, "--replicas", "2").out)["results"]
    found = row["hit_ratio"]
    assert row["cost_per_million"] == pytest.approx(0.1 * found + (1 - found))
    for replicas in ((), ("--replicas", "2")):
        out = bench(*words[:-1], *replicas).out
        assert "cost/Mtok" in out
    assert "cost/Mtok" not in bench("hit-ratio", trace).out
    half = ("hit-ratio", trace, "--price-cached", "1")
    assert "one price without the other" in refused(bench(*half, code=2))
    wrong = ("hit-ratio", trace, "--price-cached", "-1", "--price-uncached", "1")
    assert "the price of cached tokens is -1" in refused(bench(*wrong, code=2))


@pytest.mark.leaks_allowed("matplotlib keeps the files of its fonts open")
def test_an_html_report_needs_nothing_but_itself(bench, trace, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra [bench]")
    out = tmp_path / "out.html"
    text = bench("hit-ratio", trace, "--tiers", "gpu=5%,host=20%,nvme=60%", "--plot", out).out
    page = out.read_text()
    assert "<svg" in page
    for network in ("http:", "https:", "//www", "<script", "<link", "@import", " src="):
        assert network not in page, network
    assert text.splitlines()[-1] in page


@pytest.mark.parametrize(
    "words",
    [("--speedup", "2"), ("--requests", "5"), ("--page-bytes", "8KiB"), ("--plane", "grpc")],
)
def test_what_is_for_a_running_daemon_needs_one(bench, trace, words):
    assert "need --live" in refused(bench("hit-ratio", trace, *words, code=2))


CONFIG = {
    "_name_or_path": "acme/tiny",
    "model_type": "llama",
    "rope_theta": 10000.0,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def test_a_layout_says_how_many_bytes_a_token_has(bench, trace, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ("hit-ratio", trace, "--capacities", "1GiB", "--json")
    named = json.loads(bench(*words, "--model", "llama-3.1-8b").out)
    for place in (tmp_path, tmp_path / "config.json"):
        found = json.loads(bench(*words, "--layout", place).out)
        assert found["setup"]["token_bytes"] == 131_072
        assert found["results"] == named["results"]
    packed = json.loads(bench(*words, "--layout", tmp_path, "--kv-dtype", "fp8").out)
    # Scales of a page of 64 tokens: a float32 for each layer, k or v, and head.
    assert packed["setup"]["token_bytes"] == 65_536 + 32 * 2 * 8 * 4 // 64


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"model_type": "mamba"}'])
def test_what_is_no_layout(bench, trace, tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert "error: " in refused(bench("hit-ratio", trace, "--layout", path, code=2))


def test_a_layout_stands_alone(bench, trace, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ("hit-ratio", trace, "--layout", tmp_path)
    for more in (("--model", "kimi-k2"), ("--bytes-per-token", "5")):
        assert "stands beside" in refused(bench(*words, *more, code=2))


def test_ceilings_with_a_time_to_live(bench, trace):
    words = ("hit-ratio", trace, "--capacities", "20%", "--ttl", "5,1e6")
    report = json.loads(bench(*words, "--json").out)["trace"]
    short, long = report["ceiling_with_ttl"].values()
    assert 0 < short < long == report["ceiling"]["cold"]
    assert "with a time to live of 5 s since the last use" in bench(*words).out
    for wrong in ("", "x", "0", "nan", "5,,6"):
        assert "is no number of seconds" in refused(bench(*words[:-1], wrong, code=2))


def test_what_every_put_says_of_its_pages_is_heeded_by_host_memory(bench, trace):
    words = ("hit-ratio", trace, "--tiers", "host=20%", "--policy", "arc")
    plain, said = (
        json.loads(bench(*words, *more, "--json").out) for more in ((), ("--put-ttl", "3"))
    )
    assert (plain["setup"]["put_ttl_s"], said["setup"]["put_ttl_s"]) == (0, 3)
    before, after = (found["results"][0]["hit_ratio"]["cold"] for found in (plain, said))
    assert 0 < before != after > 0
    text = bench(*words, "--put-ttl", "3").out
    assert "every put says that its pages are worth keeping for 3 s" in text
    for more, why in (
        (("--policy", "fifo", "--put-ttl", "3"), "heeded by host memory under a policy of the"),
        (("--tiers", "gpu=9%", "--put-ttl", "3"), "heeded by host memory under a policy of the"),
        (("--policy", "lru", "--one-pass", "--put-ttl", "3"), "changes nothing with --one-pass"),
        (("--replicas", "2", "--put-ttl", "3"), "--put-ttl is for one replica"),
        (("--put-ttl", "3,4"), "--put-ttl takes one number of seconds"),
        (("--put-ttl", "0.0001"), "--put-ttl takes one number of seconds"),
        (("--put-ttl", "soon"), "--put-ttl 'soon' is no number of seconds"),
    ):
        assert why in refused(bench(*words, *more, code=2))


def test_files_that_never_end_or_never_answer(bench, trace, results, tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier.bench.compare._SILENCE_S", 0.05)
    monkeypatch.setattr("kvtier.cli.bench_model._SILENCE_S", 0.05)
    monkeypatch.setattr("kvtier.bench.compare._BYTES_MAX", 1 << 20)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for named, why in ((pipe, "nobody writes to this pipe"), ("/dev/zero", "more than")):
        assert why in refused(bench("compare", results[0], named, code=2))
    assert "nobody writes" in refused(bench("hit-ratio", trace, "--layout", pipe, code=2))
    assert "too large" in refused(bench("hit-ratio", trace, "--layout", "/dev/zero", code=2))
    for named in (pipe, "/dev/zero"):
        assert "is a pipe or device" in refused(bench("hit-ratio", named, code=2))
    assert "is a named pipe" in refused(bench("hit-ratio", trace, "--csv", pipe, code=2))
