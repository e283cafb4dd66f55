"""Comparing whole columns of page ids, held against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers import nvme_match
from kvtier.tiers.nvme_match import NOWHERE, PageIds, cut_loops, find, newest_of_each

Id = tuple[int, int, int]
#: Few values, so that ids meet; keys differ in their last word alone.
ids_lists = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 4)), max_size=40
)


def columns(ids: list[Id]) -> PageIds:
    key = b"".join(bytes(24) + number.to_bytes(8, "little") for _, _, number in ids)
    return PageIds(
        np.array([family for family, _, _ in ids], np.uint32),
        np.array([shard for _, shard, _ in ids], np.uint16),
        np.frombuffer(key, np.uint8).reshape(-1, 32),
    )


@pytest.fixture(params=["random", "all alike"], autouse=True, scope="module")
def mixing(request):
    """Also with a mix that is the same for every id: only the full comparison is left."""
    patch = pytest.MonkeyPatch()
    if request.param == "all alike":
        patch.setattr(nvme_match, "_factors", lambda: np.zeros(5, np.uint64))
    yield
    patch.undo()


@given(ids_lists, st.randoms(use_true_random=False))
def test_newest_of_each(ids, rng):
    generation = rng.sample(range(100), len(ids))
    newest: dict[Id, int] = {}
    for row, id_ in enumerate(ids):
        if id_ not in newest or generation[newest[id_]] < generation[row]:
            newest[id_] = row
    mask = newest_of_each(columns(ids), np.array(generation, np.uint64))
    assert set(np.flatnonzero(mask).tolist()) == set(newest.values())


def test_one_of_equals():
    mask = newest_of_each(columns([(1, 0, 3)] * 5), np.full(5, 7, np.uint64))
    assert mask.sum() == 1


@given(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 4))), ids_lists)
def test_find(known, wanted):
    ids = sorted(known)
    places = find(columns(ids), columns(wanted)).tolist()
    assert places == [ids.index(id_) if id_ in known else NOWHERE for id_ in wanted]


@given(st.data())
def test_cut_loops(data):
    count = data.draw(st.integers(0, 30))
    parents = data.draw(
        st.lists(st.integers(-1, max(count - 1, -1)), min_size=count, max_size=count)
    )

    def ends(row: int) -> bool:
        for _ in range(count + 1):
            if row < 0:
                return True
            row = parents[row]
        return False

    parent = np.array(parents, np.int32)
    endless = [row for row in range(count) if not ends(row)]
    assert cut_loops(parent) == len(endless)
    assert parent.tolist() == [-1 if row in endless else p for row, p in enumerate(parents)]
