"""Rows of SGLang's calls: of small pages, what was got is what was set, and the way is named."""

from __future__ import annotations

import pytest

import kvtier
from benchmarks import sglang_calls
from benchmarks.common import attach, daemon
from benchmarks.plan import Plan
from benchmarks.sglang_calls import Calls, Shape

SMALL = {
    "heads": Shape(name="16KiB", model="small", layers=2, heads=2, dim=16),
    "latent": Shape(name="4KiB", model="small", layers=2, heads=0, dim=16),
}


@pytest.fixture(scope="module")
def url():
    with daemon("host.bytes=64MiB") as (at, _, _):
        yield at


@pytest.mark.parametrize("kind", SMALL)
def test_a_row_for_each_call(url, kind):
    plan = Plan(quick=True, seed=3)
    with kvtier.connect(url, deadline=20) as kv:
        calls = Calls(kv, SMALL[kind], pages=8, seed=3)
        rows = list(sglang_calls.measure(plan, calls, None, attach(kv)))
        name = SMALL[kind].name
        assert [row.name for row in rows] == [
            f"sglang/set-{name}-memcpy",
            f"sglang/get-{name}-memcpy",
        ]
        assert all(row.value > 0 for row in rows)
        assert rows[1].note.startswith("all by shared memory, loops by ")
        calls.forget()
        assert sglang_calls.lookup(plan, kv).value > 0


def test_a_wrong_byte_would_be_seen(url):
    with kvtier.connect(url, deadline=20) as kv:
        calls = Calls(kv, SMALL["heads"], pages=8, seed=3)
        keys, order = calls.new_keys(), calls.order()
        calls.set(keys, order)
        calls.get(keys, order)
        calls.check(order, order)
        calls.target.kv_buffer[1, order[0], 0, 0, 0, 0] += 1
        with pytest.raises(AssertionError, match="page 0"):
            calls.check(order, order)
        calls.forget()


def test_the_shapes_have_the_sizes_they_are_called_by():
    sizes = [round(shape.page_bytes / 2**20, 1) for shape in sglang_calls.SHAPES]
    assert sizes == [2.0, 4.3, 8.0]
