"""The directory as its owner changes it: what was put is found, what was removed is not, at a cost
that does not grow with age. All of it with both implementations, which must agree to the byte.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core.page import Tier
from kvtier.errors import TierIOError
from kvtier.transfer.local.entry import PLACE_FACTORS, identities
from kvtier.transfer.local.lookup import DirectoryView
from kvtier.transfer.local.protocol import HIT, MISS, PROBES_MAX
from tests.seeds import seeds
from tests.transfer.local.directory_parts import (
    BOOT_ID,
    KERNELS,
    NAMESPACE,
    SHARD,
    content,
    directory,
    kernels_named,
    keys_of,
    rows_of,
)

WHERE = {"namespace": NAMESPACE, "shard": SHARD}


def view(made, kernels="numpy"):
    return DirectoryView(made.fd, boot_id=BOOT_ID, kernels=kernels_named(kernels))


def names(keys, generations=0):
    return identities(keys, namespaces=NAMESPACE, shards=SHARD, generations=generations)


@pytest.mark.parametrize("reading", KERNELS)
@pytest.mark.parametrize("writing", KERNELS)
def test_what_was_put_is_found_by_every_reader(writing, reading):
    keys = keys_of(1, 300)
    rows = rows_of(keys[:200], np.arange(1, 201))
    with directory(256, kernels=writing) as made, view(made, reading) as seen:
        assert made.put_many(rows).all()
        found = seen.lookup([key.tobytes() for key in keys], **WHERE)
        assert found.codes.tolist() == [HIT] * 200 + [MISS] * 100
        assert found.tiers.tolist() == [Tier.HOST] * 200 + [0] * 100
        assert np.array_equal(found.entries[:200], rows)
        assert not found.entries[200:].any()
        assert seen.recheck(found).tolist() == [True] * 200 + [False] * 100
        short = seen.lookup(keys, **WHERE, with_entries=False)
        assert short.codes.tolist() == found.codes.tolist()
        assert short.tiers.tolist() == found.tiers.tolist()
        for other in ({"namespace": 8, "shard": 3}, {"namespace": 7, "shard": 2}):
            assert not seen.lookup(keys, **other).codes.any()
        assert made.pages == 200
        assert (seen.torn_reads, seen.doubts) == (0, 0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_key_has_an_entry_for_each_namespace_and_shard(kernels):
    keys = keys_of(2, 1)
    places = [(1, 0), (1, 1), (2, 0), (2**32 - 1, 2**16 - 1)]
    with directory(kernels=kernels) as made, view(made, kernels) as seen:
        for number, (namespace, shard) in enumerate(places, 1):
            made.put_many(rows_of(keys, number, namespace=namespace, shard=shard))
        for number, (namespace, shard) in enumerate(places, 1):
            found = seen.lookup(keys, namespace=namespace, shard=shard)
            assert found.entries[0, 5] == number
        gone = identities(keys, namespaces=[1], shards=[1])
        assert made.remove_many(gone).tolist() == [True]
        hits = [seen.lookup(keys, namespace=n, shard=s).hits[0] for n, s in places]
        assert hits == [True, False, True, True]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_page_put_again_has_the_new_entry_alone(kernels):
    keys = keys_of(3, 10)
    with directory(kernels=kernels) as made, view(made, kernels) as seen:
        made.put_many(rows_of(keys, 1))
        old = seen.lookup(keys, **WHERE)
        twice = np.concatenate([rows_of(keys[:5], 2), rows_of(keys[:5], 3)])
        assert made.put_many(twice).all()
        assert made.pages == 10
        found = seen.lookup(keys, **WHERE)
        assert found.entries[:, 5].tolist() == [3] * 5 + [1] * 5
        assert seen.recheck(old).tolist() == [False] * 5 + [True] * 5


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_removal_can_mean_one_allocation(kernels):
    keys = keys_of(4, 3)
    with directory(kernels=kernels) as made:
        made.put_many(rows_of(keys, [5, 6, 7]))
        assert made.remove_many(names(keys, [4, 6, 0])).tolist() == [False, True, True]
        assert made.remove_many(names(keys)).tolist() == [True, False, False]
        assert made.pages == 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_moved_entry_passes_the_recheck(kernels):
    """Removal closes the gap: what moved is still the same entry."""
    keys = keys_of(5, 8)
    with directory(8, kernels=kernels) as made, view(made, kernels) as seen:
        made.put_many(rows_of(keys, 1))
        moved = 0
        for gone in range(8):
            found = seen.lookup(keys, **WHERE)
            made.remove_many(names(keys[gone : gone + 1]))
            after = seen.lookup(keys, **WHERE)
            moved += int(np.count_nonzero(found.places[after.hits] != after.places[after.hits]))
            expected = [number > gone for number in range(8)]
            assert seen.recheck(found).tolist() == expected
            assert after.hits.tolist() == expected
        assert moved > 0


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("seed", seeds(3, of=6))
def test_random_changes_against_a_dict(kernels, seed):
    """A table of 16 places, so that runs are long and go round its end."""
    draw = np.random.default_rng(seed)
    keys = keys_of(seed + 100, 14)
    model: dict[int, int] = {}
    with directory(8, kernels=kernels) as made, view(made, kernels) as seen:
        for generation in range(1, 250):
            chosen = draw.choice(14, draw.integers(1, 5), replace=False)
            if draw.random() < 0.5:
                placed = made.put_many(rows_of(keys[chosen], generation)).tolist()
                for number, is_placed in zip(chosen.tolist(), placed, strict=True):
                    assert is_placed == (number in model or len(model) < 8)
                    if is_placed:
                        model[number] = generation
            else:
                removed = made.remove_many(names(keys[chosen])).tolist()
                assert removed == [number in model for number in chosen.tolist()]
                for number in chosen.tolist():
                    model.pop(number, None)
            found = seen.lookup(keys, **WHERE)
            assert found.codes.tolist() == [int(number in model) for number in range(14)]
            there = sorted(model)
            expected = rows_of(keys[there], [model[number] for number in there])
            assert np.array_equal(found.entries[there][:, :15], expected[:, :15])
            assert made.pages == len(model)
            assert seen.recheck(found).tolist() == found.hits.tolist()


@pytest.mark.skipif(len(KERNELS) < 2, reason="one implementation is installed")
@pytest.mark.parametrize("seed", range(3))
def test_both_implementations_leave_the_same_bytes(seed):
    pytest.importorskip("numba", reason="numba is not installed")
    draw = np.random.default_rng(seed)
    keys = keys_of(seed, 60)
    with directory(32, kernels="numba") as one, directory(32, kernels="numpy") as two:
        for generation in range(1, 120):
            chosen = keys[draw.choice(60, 7)]
            for made in (one, two):
                if generation % 3:
                    made.put_many(rows_of(chosen, generation))
                else:
                    made.remove_many(names(chosen))
        assert content(one) == content(two)
        counts = [(d.pages, d.refused, d.steps, d.longest_probe) for d in (one, two)]
        assert counts[0] == counts[1]
        one.clear()
        two.clear()
        assert content(one) == content(two)


@pytest.mark.parametrize(("kernels", "rounds"), [(*KERNELS[0].values, 1500), ("numpy", 12)])
def test_searches_stay_short_after_many_changes(kernels, rounds):
    """At the highest load, 1,024 of 4,096 pages replaced each round: steps as in a fresh table."""
    if kernels == "numba":
        pytest.importorskip("numba", reason="numba is not installed")
    seed = 11
    draw = np.random.default_rng(seed)
    keys = keys_of(seed, 4096)
    with directory(4096, kernels=kernels) as made, view(made, kernels) as seen:
        assert made.put_many(rows_of(keys, 1)).all()
        assert made.pages == made.pages_max == made.header.entries // 2
        costs = []
        for round_ in range(rounds):
            chosen = draw.choice(4096, 1024, replace=False)
            before = made.steps
            assert made.remove_many(names(keys[chosen])).all()
            keys[chosen] = draw.integers(0, 256, (1024, 32), np.uint8)
            assert made.put_many(rows_of(keys[chosen], round_ + 2)).all()
            costs.append((made.steps - before) / 2048)
        assert seen.lookup(keys, **WHERE).hits.all()
        # Of a removal: the search and the run behind it; of a put: the run from its home on.
        assert np.mean(costs[-6:]) < 1.15 * np.mean(costs[:6])
        assert max(costs) < 4
        assert made.longest_probe < 100
        assert made.refused == 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_full_directory_refuses_and_counts(kernels):
    keys = keys_of(6, 10)
    with directory(8, kernels=kernels) as made, view(made, kernels) as seen:
        assert made.put_many(rows_of(keys, 1)).tolist() == [True] * 8 + [False] * 2
        assert made.refused == 2
        # A page that is there needs no room.
        assert made.put_many(rows_of(keys[:2], 2)).all()
        made.remove_many(names(keys[:1]))
        assert made.put_many(rows_of(keys[8:], 3)).tolist() == [True, False]
        assert seen.lookup(keys, **WHERE).hits.tolist() == [False] + [True] * 8 + [False]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_without_a_state_is_refused(kernels):
    rows = rows_of(keys_of(7, 2), 1)
    rows[1, 4] = 5
    with directory(kernels=kernels) as made:
        assert made.put_many(rows).tolist() == [True, False]
        assert (made.pages, made.refused) == (1, 1)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_run_that_is_too_long_refuses(kernels):
    """Keys with one home (words that the hash adds up to the same): PROBES_MAX of them go in."""
    words = np.zeros((PROBES_MAX + 3, 4), np.uint64)
    factor, other = (np.uint64(number) for number in PLACE_FACTORS[:2])
    words[:, 1] = np.arange(len(words), dtype=np.uint64) * other
    words[:, 2] = (np.uint64(0) - np.arange(len(words), dtype=np.uint64)) * factor
    keys = words.view(np.uint8)
    with directory(1024, kernels=kernels) as made, view(made, kernels) as seen:
        placed = made.put_many(rows_of(keys, 1))
        assert placed.tolist() == [True] * PROBES_MAX + [False] * 3
        assert made.longest_probe == PROBES_MAX
        found = seen.lookup(keys, **WHERE)
        assert found.codes.tolist() == [HIT] * PROBES_MAX + [MISS] * 3
        assert made.remove_many(names(keys[:10])).all()
        assert seen.lookup(keys, **WHERE).hits.tolist() == [False] * 10 + [True] * 246 + [False] * 3
        assert seen.recheck(found).tolist() == [False] * 10 + [True] * 246 + [False] * 3


@pytest.mark.parametrize("kernels", KERNELS)
def test_clear_leaves_the_namespaces(kernels):
    keys = keys_of(8, 20)
    with directory(kernels=kernels) as made, view(made, kernels) as seen:
        made.set_namespace(NAMESPACE, 2)
        made.put_many(rows_of(keys, 1))
        found = seen.lookup(keys, **WHERE)
        made.clear()
        assert made.pages == 0
        assert not seen.lookup(keys, **WHERE).codes.any()
        assert not seen.recheck(found).any()
        assert seen.namespace_is_current(NAMESPACE, 2)
        assert made.put_many(rows_of(keys, 2)).all()
        assert seen.lookup(keys, **WHERE).hits.all()


@pytest.mark.parametrize("kernels", KERNELS)
def test_after_close_readers_find_nothing(kernels):
    keys = keys_of(9, 20)
    made = directory(kernels=kernels)
    with view(made, kernels) as seen:
        made.set_namespace(NAMESPACE, 2)
        made.put_many(rows_of(keys, 1))
        found = seen.lookup(keys, **WHERE)
        assert seen.is_open
        made.close()
        made.close()
        assert not seen.is_open
        assert not seen.lookup(keys, **WHERE).codes.any()
        assert not seen.recheck(found).any()
        assert not seen.namespace_is_current(NAMESPACE, 2)
        for use in (
            lambda: made.fd,
            lambda: made.put_many(rows_of(keys, 1)),
            lambda: made.remove_many(names(keys)),
            lambda: made.set_namespace(1, 1),
            made.clear,
        ):
            with pytest.raises(TierIOError, match="the directory is closed"):
                use()
