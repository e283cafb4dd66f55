"""Compiled code whose cache a power cut has torn."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("numba", reason="numba is in the extra [fast]")

FIRST_CALL = """
from kvtier.core.jit import compiled


@compiled
def more(number):
    return number + 1
"""
GIVEN_TYPES = """
from kvtier.packing.jit_numba import compiled


@compiled("i8(i8)")
def more(number):
    return number + 1
"""


def begun_anew(path):
    """The module as a new process would load it."""
    spec = importlib.util.spec_from_file_location("kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.more


@pytest.mark.parametrize("left", [0, 20], ids=["empty", "half"])
@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("source", [FIRST_CALL, GIVEN_TYPES], ids=["first-call", "given-types"])
def test_a_torn_cache_is_compiled_again_and_mended(tmp_path, source, ending, left):
    path = tmp_path / "kernels.py"
    path.write_text(source)
    assert begun_anew(path)(1) == 2
    (torn,) = tmp_path.rglob(f"*.{ending}")
    torn.write_bytes(torn.read_bytes()[:left])
    assert begun_anew(path)(1) == 2
    mended = begun_anew(path)
    assert mended(1) == 2
    assert sum(mended.stats.cache_hits.values()) == 1
