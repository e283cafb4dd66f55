"""A run of the benchmarks end to end: the cheapest rows, and what cannot be measured."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import bench, nvme_io
from benchmarks.memory import Pieces, of_size
from benchmarks.plan import Plan, fio_command, wants, wants_some
from benchmarks.rows import Missing, Row
from tests.benchmarks.test_bench_rows import FIELDS


def test_a_quick_run_writes_everything(tmp_path, capsys):
    out = tmp_path / "bench"
    words = ["--quick", "--only", "machine/memcpy-64KiB", "--out", str(out), "--seed", "7"]
    assert bench.main(words) == 0
    saved = json.loads((out / "results.json").read_text())
    assert [row["name"] for row in saved["rows"]] == ["machine/memcpy-64KiB"]
    (row,) = saved["rows"]
    assert set(row) == FIELDS
    assert row["value"] > 0
    assert row["rounds"] == 2
    assert row["reached"] == "no target"
    assert saved["not_measured"] == []
    assert saved["quick"] is True
    assert saved["seed"] == 7
    assert set(saved["machine"]) == {"cpu", "cores", "cores_usable", "memory_bytes", "kernel"}
    assert set(saved["versions"]) == {
        "python", "numpy", "numba", "torch", "grpcio", "xxhash", "kvtier"
    }  # fmt: skip
    assert {"commit", "dirty", "date", "load_average"} <= set(saved)
    said = capsys.readouterr()
    assert said.out == (out / "results.md").read_text()
    assert "| machine/memcpy-64KiB | memmove, pieces of 64 KiB |" in said.out
    assert "A quick run" in said.out
    assert "[1/1] benchmarks.memory" in said.err


def test_no_fio_is_said_and_the_run_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KVTIER_FIO", raising=False)
    assert bench.main(["--quick", "--only", "nvme", "--out", str(tmp_path / "out")]) == 0
    reason = "fio is not installed: put it on the PATH, or name it with KVTIER_FIO"
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert saved["rows"] == []
    assert saved["not_measured"] == [{"name": "nvme", "reason": reason}]
    assert f"- not measured: nvme: {reason}" in capsys.readouterr().out
    assert list(nvme_io.rows(Plan(), None)) == [Missing(name="nvme", reason=reason)]


def test_fio_is_taken_from_the_environment_once(monkeypatch):
    """The daemon does not start with a variable that it doesn't know."""
    monkeypatch.setenv("KVTIER_FIO", "/opt/fio")
    assert fio_command() == "/opt/fio"
    assert fio_command() == shutil.which("fio")


def test_a_benchmark_that_fails_is_named_and_fails_the_run(tmp_path, capsys, monkeypatch):
    broken = bench.Group(
        kind=bench.Kind.PAGES, module="benchmarks.not_there", rows=("broken/", "more/")
    )
    monkeypatch.setattr(bench, "GROUPS", (broken,))
    assert bench.main(["--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "- not measured: broken/ more/: benchmarks.not_there ended with 1: " in said
    assert "No module named benchmarks.not_there" in said


def test_a_prefix_that_names_nothing_is_refused(tmp_path, capsys):
    assert bench.main(["--only", "nothing", "--out", str(tmp_path / "out")]) == 2
    assert "no row begins with nothing; they begin with machine/, " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_row_is_of_one_group():
    names = [name for group in bench.GROUPS for name in group.rows]
    assert len(set(names)) == len(names)
    assert not [
        name for name in names for other in names if name != other and wants((name,), other)
    ]


@pytest.mark.parametrize(
    ("only", "name", "row", "group"),
    [
        ((), "local/get", True, True),
        (("local",), "local/get", True, True),
        (("local/get-2MiB-1",), "local/get", False, True),
        (("fp8", "local/get-2MiB"), "local/get-2MiB-32", True, True),
        (("local/get-2MiB-32",), "local/get-2MiB-1", False, False),
        (("sglang-ttft/host",), "sglang/", False, False),
        (("sglang/",), "sglang-ttft/", False, False),
    ],
)
def test_prefixes_choose_rows_and_groups(only, name, row, group):
    assert wants(only, name) is row
    assert wants_some(only, name) is group


def modules(only=(), kind=bench.Kind.PAGES):
    return [group.module.removeprefix("benchmarks.") for group in bench.chosen(only, kind)]


def test_a_run_is_of_one_kind_unless_rows_are_named():
    assert "memory" in modules()
    assert "engine_decode" not in modules()
    engines = modules(kind=bench.Kind.ENGINES)
    assert engines[0] == "engine_decode"
    assert "sglang_ttft" in engines
    named = modules(("start/memory", "fp8", "sglang-ttft"))
    assert named == ["fp8", "engine_prefix", "sglang_ttft"]


def test_the_table_of_the_readme_is_that_of_the_runs():
    """Every benchmark that it has a line for is in one of the runs, with the rows that it says; but
    for those of which it says that they are not.
    """
    text = (Path(bench.__file__).parent / "README.md").read_text(encoding="utf-8")
    found = {}
    line = r"^\| `python -m benchmarks\.(\S+?)(?: \w+)?` \| (.*?) \|"
    for module, rows in re.findall(line, text, re.MULTILINE):
        found[f"benchmarks.{module}"] = tuple(re.findall("`(.*?)`", rows)) or rows
    others = {name for name, rows in found.items() if rows == "in neither table"}
    assert others == {"benchmarks.policies", "benchmarks.memory_needed"}
    assert {name: rows for name, rows in found.items() if name not in others} == {
        group.module: group.rows for group in bench.GROUPS
    }


def test_memory_rows_of_a_few_kib():
    plan = Plan(quick=True, only=("machine/",))
    copied, summed = of_size(plan, 4 << 10, 64 << 10)
    assert [row.name for row in (copied, summed)] == ["machine/memcpy-4KiB", "machine/xxh3-4KiB"]
    assert copied.value > 0
    assert (summed.ratio > 0, summed.reference_value > 0) == (True, True)
    pieces = Pieces(4 << 10, 64 << 10, 1)
    pieces.memmove(list(range(pieces.count)))
    assert (pieces.copied == pieces.source).all()
    assert (pieces.target == 1).all()


def row_of(ratio: float, value: float = 1.0) -> Row:
    return Row.of_pairs("a/b", "what", [(value * ratio, value)] * 3, "GB/s", "memmove")


def test_a_row_is_the_median_of_its_passes():
    found = bench.Found()
    lost = Missing(name="c", reason="no c")
    for ratio in (0.5, 0.9, 0.6):
        found.add(bench.Outcome(rows=[row_of(ratio)], missing=[lost], is_failed=ratio == 0.9))
    (row,) = found.rows()
    assert (row.ratio, row.low, row.high, row.rounds) == (0.6, 0.5, 0.9, 9)
    assert (row.value, row.reference_value) == (0.6, 1.0)
    assert found.missing() == [lost]
    assert found.is_failed
    assert found.as_json()["rows"] == [row.as_json()]


def test_a_row_that_one_pass_alone_has_is_there():
    found = bench.Found()
    found.add(bench.Outcome(rows=[], missing=[], is_failed=False))
    found.add(bench.Outcome(rows=[row_of(2.0)], missing=[], is_failed=False))
    assert [row.ratio for row in found.rows()] == [2.0]
    assert not found.is_failed


def test_every_pass_is_a_process_with_its_share_of_the_rounds(tmp_path, monkeypatch):
    seen = []

    def run(group, words):
        seen.append((group.rows[0], words[words.index("--passes") + 1]))
        return bench.Outcome(rows=[row_of(len(seen))], missing=[], is_failed=False)

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(bench, "draw", lambda rows, path: "no picture")
    words = ["--passes", "2", "--only", "machine", "fp8", "--out", str(tmp_path)]
    assert bench.main(words) == 0
    assert seen == [("machine/", "2"), ("fp8/", "2")] * 2
    saved = json.loads((tmp_path / "results.json").read_text())
    assert (saved["passes"], [row["ratio"] for row in saved["rows"]]) == (2, [2.5])


@pytest.mark.parametrize(
    ("passes", "full", "rounds"), [(1, 9, 9), (3, 9, 3), (3, 41, 14), (3, 6, 3), (3, 1, 1)]
)
def test_a_share_of_the_rounds(passes, full, rounds):
    assert Plan(passes=passes).rounds(full) == rounds
    assert Plan(passes=passes, quick=True).rounds(41) == 2
    assert Plan(passes=passes, rounds_given=7).rounds(full) == 7
