"""Time to the first token on a real server: that it runs, and that it says why not."""

from __future__ import annotations

import pytest

from benchmarks import sglang_ttft
from benchmarks.plan import Plan
from benchmarks.rows import Missing
from tests.sglang.environment import ENVIRONMENT


def test_without_sglang_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sglang_ttft, "ENVIRONMENT", tmp_path)
    assert list(sglang_ttft.rows(Plan())) == [
        Missing(name="sglang-ttft/", reason="no SGLang: make sglang-env")
    ]


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    not (ENVIRONMENT / ".installed").exists(), reason="needs a real SGLang: make sglang-env"
)
def test_a_quick_run_measures_every_place(tmp_path):
    rows = list(sglang_ttft.rows(Plan(quick=True, directory=tmp_path, rounds_given=1)))
    assert [row.name for row in rows] == [f"sglang-ttft/{place}" for place in sglang_ttft.PLACES]
    assert all(row.value > 0 and row.ratio > 0 for row in rows)
