"""Under which name pages are stored and found while weights are updated, step by step."""

from __future__ import annotations

import pytest

from kvtier_sglang.weights import LoadedWeights, Outcome


class Cache:
    """What it was told last: a name, or None for a pause."""

    def __init__(self) -> None:
        self.weights: str | None = ""
        self.told: list[str | None] = []

    def pause(self) -> None:
        self.weights = None
        self.told.append(None)

    def resume(self, weights: str) -> None:
        self.weights = weights
        self.told.append(weights)


@pytest.fixture
def weights():
    return LoadedWeights()


@pytest.fixture
def cache(weights):
    made = Cache()
    weights.attach(made)
    return made


def update(weights, version, outcome=Outcome.DONE, *, is_flushed=True):
    weights.change_begins()
    if is_flushed:
        weights.flushed()
    weights.change_ends(version, outcome)


def test_an_update_with_a_version_has_its_name(weights, cache):
    update(weights, "v2")
    assert cache.told == [None, "v2"]
    assert weights.name == "v2"


def test_updates_without_a_version_have_names_of_their_own(weights, cache):
    names = []
    for _ in range(3):
        update(weights, None)
        names.append(cache.weights)
    other = LoadedWeights()
    update(other, None)
    assert len({*names, other.name, ""}) == 5


def test_a_failed_update_is_not_called_what_it_should_have_become(weights, cache):
    update(weights, "v2", Outcome.DOUBTFUL)
    assert cache.weights not in ("", "v2", None)


def test_ranks_of_one_server_agree_without_asking(weights):
    ranks = [LoadedWeights() for _ in range(2)]
    for rank in ranks:
        rank.launched_as("server")
        for version in (None, "v2", None):
            update(rank, version)
    assert ranks[0].name == ranks[1].name
    weights.launched_as("another server")
    for version in (None, "v2", None):
        update(weights, version)
    assert weights.name != ranks[0].name


def test_until_it_is_flushed_it_is_paused(weights, cache):
    update(weights, "v2", is_flushed=False)
    assert cache.weights is None
    late = Cache()
    weights.attach(late)
    assert late.weights is None
    weights.flushed()
    assert (cache.weights, late.weights) == ("v2", "v2")


def test_a_flush_alone_changes_nothing(weights, cache):
    weights.flushed()
    assert set(cache.told) <= {""}


def test_a_session_of_many_parts_is_one_update(weights, cache):
    weights.session_begins()
    assert cache.weights is None
    for version in (None, "v2", None):
        update(weights, version)
        assert cache.weights is None
    weights.session_ends(is_clean=True)
    assert cache.told[-1] == "v2"
    assert set(cache.told) == {None, "v2"}


def test_a_session_with_a_part_that_failed_or_none_has_a_new_name(weights, cache):
    weights.session_begins()
    update(weights, "v2", Outcome.DOUBTFUL)
    update(weights, "v2")
    weights.session_ends(is_clean=True)
    failed = cache.weights
    weights.session_begins()
    weights.session_ends(is_clean=True)
    assert len({failed, cache.weights, "v2", "", None}) == 5


def test_a_session_that_leaves_kv_waits_for_a_flush(weights, cache):
    weights.session_begins()
    update(weights, "v2")
    weights.session_ends(is_clean=False)
    assert cache.weights is None
    weights.flushed()
    assert cache.weights == "v2"


def test_a_name_given_later_moves_what_is_settled_alone(weights, cache):
    weights.named("v2")
    assert cache.told == ["v2"]
    update(weights, None, is_flushed=False)
    weights.named("v3")
    assert cache.weights is None
    weights.flushed()
    assert cache.weights == "v3"


def test_a_name_given_after_a_failed_update_is_not_shared(weights, cache):
    update(weights, "v2", Outcome.DOUBTFUL)
    failed = cache.weights
    weights.named("v2")
    assert cache.weights not in ("v2", failed)
    assert failed in cache.weights, "still no other weights have it"
    weights.session_begins()
    update(weights, None, Outcome.DOUBTFUL)
    weights.session_ends(is_clean=True)
    weights.named("v2")
    assert cache.weights != "v2"
    update(weights, "v2")
    assert cache.weights == "v2"


def test_a_session_that_failed_on_another_rank_is_not_shared(weights, cache):
    weights.session_begins()
    update(weights, "v2")
    assert weights.session is Outcome.DONE
    weights.session_ends(Outcome.DOUBTFUL, is_clean=True)
    assert cache.weights not in ("v2", "", None)


def test_an_update_that_changed_nothing_leaves_the_name(weights, cache):
    update(weights, "v1")
    update(weights, "typo", Outcome.UNTOUCHED, is_flushed=False)
    assert cache.told == [None, "v1", None, "v1"]
    update(weights, "v2", Outcome.DOUBTFUL, is_flushed=False)
    update(weights, "typo", Outcome.UNTOUCHED, is_flushed=False)
    assert cache.weights is None, "KV of both weights is still there"
    weights.flushed()
    assert cache.weights not in ("v1", "v2", "typo")
    weights.named("v2")
    assert cache.weights != "v2", "and they are as doubtful as before"


def test_what_was_not_seen_is_a_miss_until_a_flush_and_shared_with_nobody(weights, cache):
    weights.launched_as("server")
    sibling = LoadedWeights()
    sibling.launched_as("server")
    update(weights, "v1")
    weights.lost()
    assert cache.weights is None
    update(weights, None, Outcome.UNTOUCHED, is_flushed=False)
    assert cache.weights is None
    weights.flushed()
    assert cache.weights not in ("v1", "", None)
    update(weights, None)
    for _ in range(4):
        update(sibling, None)
        assert sibling.name != cache.weights


def test_a_cache_that_has_gone_is_told_nothing(weights, cache):
    weights.detach(cache)
    weights.detach(cache)
    update(weights, "v2")
    assert cache.told == []
