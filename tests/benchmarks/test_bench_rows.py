"""Rows of the benchmarks: judged right, saved whole, compared fairly."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.compare import compare
from benchmarks.picture import draw
from benchmarks.rows import Bound, Missing, Of, Reached, Row, Target, markdown, size_text

FIELDS = {
    "name", "what", "value", "unit", "reference", "reference_value", "ratio", "target", "reached",
    "rounds", "low", "high", "note",
}  # fmt: skip


def row(name="a/b", ratio=1.0, **changed):
    return Row(
        **{
            "name": name, "what": "what", "value": 2.0 * ratio, "unit": "GB/s",
            "reference": "other", "reference_value": 2.0, "ratio": ratio, "rounds": 3,
            "low": 0.9, "high": 1.1,
        }
        | changed
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bound", "of", "measured", "reached"),
    [
        (Bound.AT_LEAST, Of.RATIO, 0.8, Reached.YES),
        (Bound.AT_LEAST, Of.RATIO, 0.7999, Reached.NO),
        (Bound.AT_MOST, Of.RATIO, 0.8, Reached.YES),
        (Bound.AT_MOST, Of.RATIO, 0.8001, Reached.NO),
        (Bound.AT_LEAST, Of.VALUE, 0.8, Reached.YES),
        (Bound.AT_LEAST, Of.VALUE, 0.7999, Reached.NO),
        (Bound.AT_MOST, Of.VALUE, 0.8, Reached.YES),
        (Bound.AT_MOST, Of.VALUE, 0.8001, Reached.NO),
    ],
)
def test_a_target_is_reached_at_its_border_and_not_beyond(bound, of, measured, reached):
    target = Target(bound=bound, number=0.8, of=of)
    one = row(ratio=measured) if of is Of.RATIO else row(value=measured)
    assert one.reached is Reached.NO_TARGET
    judged = row(**(one_fields(one) | {"target": target}))
    assert judged.reached is reached


def one_fields(one):
    return {name: getattr(one, name) for name in FIELDS - {"reached"}}


def test_a_target_for_a_ratio_needs_a_ratio():
    without = row(ratio=1.0, target=Target(bound=Bound.AT_LEAST, number=1.0))
    without = Row(**(one_fields(without) | {"ratio": None}))
    with pytest.raises(ValueError, match="a/b has a target for its ratio and no ratio"):
        _ = without.reached


def test_the_ratio_is_the_median_of_the_rounds():
    found = Row.of_pairs("a", "b", [(1.0, 2.0), (3.0, 4.0), (9.0, 10.0)], "GB/s", "other")
    assert (found.value, found.reference_value, found.ratio) == (3.0, 4.0, 0.75)
    assert (found.low, found.high, found.rounds) == (0.5, 0.9, 3)
    alone = Row.of_values("a", "b", [3.0, 1.0, 2.0], "us")
    assert (alone.value, alone.low, alone.high, alone.ratio) == (2.0, 1.0, 3.0, None)


def test_a_saved_row_comes_back():
    for one in (row(), row(target=Target(bound=Bound.AT_MOST, number=5.0, of=Of.VALUE), note="n")):
        saved = json.loads(json.dumps(one.as_json()))
        assert set(saved) == FIELDS
        assert Row.from_json(saved) == one


def test_a_changed_verdict_in_a_file_is_not_believed():
    saved = row(ratio=0.5, target=Target(bound=Bound.AT_LEAST, number=0.8)).as_json()
    assert saved["reached"] == "no"
    assert Row.from_json(saved | {"reached": "yes"}).reached is Reached.NO


def test_the_table_has_a_line_for_each_row_and_each_absence():
    text = markdown(
        [row(target=Target(bound=Bound.AT_LEAST, number=0.8), note="a | b")],
        [Missing(name="nvme", reason="fio is not installed")],
    )
    lines = text.splitlines()
    assert lines[2] == (
        "| a/b | what | 2 GB/s | other: 2 GB/s | 1.00 | 0.9 to 1.1 | 3 | >= 0.8 x | yes | a / b |"
    )
    assert lines[-1] == "- not measured: nvme: fio is not installed"


@pytest.mark.parametrize(
    ("nbytes", "text"), [(368 << 10, "368 KiB"), (2 << 20, "2 MiB"), (100, "100 bytes")]
)
def test_sizes_are_written_for_people(nbytes, text):
    assert size_text(nbytes) == text


def saved_run(path, **ratios):
    rows = [row(name, ratio).as_json() for name, ratio in ratios.items()]
    path.write_text(json.dumps({"rows": rows}))
    return path


@pytest.mark.parametrize(
    ("other", "status"), [(1.0, 0), (1.15, 0), (1 / 1.15, 0), (1.16, 1), (0.86, 1)]
)
def test_runs_agree_within_15_percent(tmp_path, capsys, other, status):
    one = saved_run(tmp_path / "a.json", fp8=8.0, get=1.0)
    assert compare(one, saved_run(tmp_path / "b.json", fp8=8.0, get=other)) == status
    said = capsys.readouterr().out
    assert said.startswith("get: ratio 1.000") is bool(status)
    assert f"{2 - status} of 2 ratios agree within 15 %" in said


def test_rows_of_one_run_alone_are_named_and_nothing_in_common_is_no_agreement(tmp_path, capsys):
    one, other = saved_run(tmp_path / "a", get=1.0, put=1.0), saved_run(tmp_path / "b", get=1.0)
    assert compare(one, other) == 0
    assert f"only in {one}: put\n" in capsys.readouterr().out
    assert compare(other, saved_run(tmp_path / "c", put=1.0)) == 1
    assert "nothing was compared" in capsys.readouterr().out


def test_without_matplotlib_the_run_goes_on_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = draw([row()], tmp_path / "results.png")
    assert said == "no picture: matplotlib is not installed (pip install 'kvtier[bench]')"
    assert list(tmp_path.iterdir()) == []
