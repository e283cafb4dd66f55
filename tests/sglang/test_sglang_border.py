"""Nothing that goes wrong in the binding goes on in SGLang."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from kvtier_sglang.border import answers
from kvtier_sglang.meters import Meter


class Backend:
    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    @answers(lambda keys, extra=None: [False] * len(keys))
    def get(self, keys: list[str], extra: object = None) -> list[bool]:
        """Gets."""
        if self._error is not None:
            raise self._error
        return [True] * len(keys)


def test_what_goes_well_is_not_touched():
    assert Backend(None).get(["a", "b"]) == [True, True]
    assert Backend.get.__doc__ == "Gets."


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), OSError(5, "no")])
def test_an_error_is_a_miss_and_is_logged(caplog, error):
    with caplog.at_level(logging.ERROR):
        assert Backend(error).get(["a", "b"], extra=1) == [False, False]
    assert "get failed and counts as a miss" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_the_end_of_the_process_is_not_held_up(error):
    with pytest.raises(type(error)):
        Backend(error).get(["a"])


def test_a_meter_that_nobody_reads_stays_small():
    meter = Meter()
    for _ in range(5000):
        meter.add(1, 10**9, 1.0)
    moved = meter.take()
    assert len(moved.pages) == len(moved.bandwidths) == 1024
    assert moved.bandwidths[0] == 1.0
    assert meter.take().pages == []


def test_importing_the_binding_loads_neither_sglang_nor_torch():
    code = (
        "import sys, kvtier_sglang.store, kvtier_sglang.pools; "
        "print(sorted({'torch', 'sglang'} & set(sys.modules)))"
    )
    path = [*sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"
