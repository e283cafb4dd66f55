"""Rows of one host say by which way the pages went: a row of gRPC must not pass for another."""

from __future__ import annotations

import pytest

import kvtier
from benchmarks import local, local_put
from benchmarks.common import attach, daemon
from benchmarks.memory import Pieces
from benchmarks.plan import Plan

PAGE = 4 << 10


@pytest.fixture(scope="module")
def url():
    with daemon("host.bytes=64MiB") as (at, _, _):
        yield at


@pytest.mark.parametrize("plane", ["auto", "grpc"])
def test_rows_of_one_host_name_the_way(url, plane):
    plan = Plan(quick=True, seed=3)
    with kvtier.connect(url, deadline=20, plane=plane) as kv:
        gets = local.Gets(kv, Pieces(PAGE, 64 * PAGE, 3))
        kernels = attach(kv) if plane == "auto" else ""
        case = local.Case(name="local/get-4KiB-32", batch=32, target=None, pages_max=64)
        got = local.measure(plan, kv, gets, case, kernels)
        puts = local_put.Puts(kv, Pieces(PAGE, 64 * PAGE, 3), 3)
        case = local_put.Case(name="local/put-4KiB-32", batch=32, is_full=False, target=None)
        put = local_put.measure(plan, kv, puts, case)
    assert got.value > 0
    assert put.value > 0
    if plane == "grpc":
        assert got.note.startswith("OVER GRPC")
        assert put.note.startswith("OVER GRPC")
    else:
        assert got.note.startswith("all by shared memory, loops by ")
        # As the daemon had slots to grant: the row may not claim what was not so.
        stored = kv.local.puts.stored
        assert put.note.startswith("all by shared memory" if stored >= 3 * 64 else "PARTLY OVER")
    assert puts.stored == puts.asked == 3 * 64


@pytest.mark.parametrize(
    ("counted", "reason", "note"),
    [
        ({"stored": 9}, "", "all by shared memory (stored 9)"),
        ({"left": 9}, "plane", "OVER GRPC: plane"),
        ({"stored": 8, "left": 1}, "", "PARTLY OVER GRPC: 8 of 9 pages by shared memory"),
    ],
)
def test_the_note_of_puts(counted, reason, note):
    assert local_put.went_by(counted, 9, reason).startswith(note)


def test_a_get_that_left_a_page_to_the_daemon_says_so():
    assert local.came_by({"hits": 5}, "numba") == "all by shared memory, loops by numba"
    said = local.came_by({"hits": 5, "left": 1}, "numba")
    assert said == "OVER GRPC: 1 pages of 6 at least (counted: hits 5, left 1)"
    assert local.came_by({}, "").startswith("OVER GRPC")
