"""The prefix tree against a plain dictionary of prefixes, and its rules one by one."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest

from kvtier_engine.cache.radix import Lock, RadixCache
from kvtier_engine.errors import EngineInconsistent
from tests.seeds import seeds

SIZE = 4


def tokens(*pages: int) -> list[int]:
    """The tokens of pages that are told apart by one number each."""
    return [page * 10 + at for page in pages for at in range(SIZE)]


def cache_of(not_ours: Collection[int] = ()) -> RadixCache:
    """A page's tag is its own number here."""

    def are_ours(pages: Sequence[int], tags: Sequence[int]) -> list[bool]:
        return [p == t and p not in not_ours for p, t in zip(pages, tags, strict=True)]

    return RadixCache(SIZE, are_ours)


def test_a_page_of_somebody_else_goes_with_all_that_follows_it() -> None:
    not_ours: set[int] = set()
    cache = cache_of(not_ours)
    cache.insert(tokens(1, 2, 3), [11, 12, 13], [11, 12, 13])
    cache.insert(tokens(1, 5), [11, 15], [11, 15])
    lock = cache.lock(cache.match(tokens(1, 2, 3)))
    not_ours.add(12)
    assert cache.prune(tokens(1, 5)) == []
    assert cache.prune(tokens(1, 2, 3, 4)) == [13]  # 12 is another's: it is not given back
    assert (cache.match(tokens(1, 2, 3)).pages, cache.stale_pages) == ((11,), 1)
    assert sorted(cache.check()) == [11, 15]
    lock.release()
    assert sorted(cache.evict(9)) == [11, 15]
    assert cache.locks == cache.pages == 0


def test_what_was_dropped_under_its_lock_keeps_nothing_from_being_evicted() -> None:
    cache = cache_of()
    cache.insert(tokens(1, 2), [11, 12], [11, 12])
    cache.insert(tokens(1, 3), [11, 13], [11, 13])
    lock = cache.lock(cache.match(tokens(1, 2)))
    assert cache.drop(tokens(1, 2), 1) == [12]
    assert cache.drop(tokens(1, 3), 1) == [13]
    assert cache.evict(9) == []  # the lock counts until it is released
    lock.release()
    assert cache.evict(9) == [11]


def test_an_evicted_page_of_somebody_else_is_not_given_back() -> None:
    not_ours = {12}
    cache = cache_of(not_ours)
    cache.insert(tokens(1, 2, 3), [11, 12, 13], [11, 12, 13])
    assert cache.evict(2) == [13, 11]
    assert (cache.pages, cache.stale_pages) == (0, 1)


def test_match_finds_the_longest_prefix_of_whole_pages() -> None:
    cache = cache_of()
    assert cache.insert(tokens(1, 2, 3), [11, 12, 13], [11, 12, 13]) == [11, 12, 13]
    assert cache.match(tokens(1, 2, 3, 4)).pages == (11, 12, 13)
    assert cache.match(tokens(1, 2, 9)).pages == (11, 12)
    assert cache.match(tokens(1, 2)[:-1]).pages == (11,)
    assert cache.match(tokens(2)).pages == ()


def test_what_is_there_already_stays_and_is_not_taken() -> None:
    cache = cache_of()
    cache.insert(tokens(1, 2), [11, 12], [11, 12])
    assert cache.insert(tokens(1, 5), [21, 25], [21, 25]) == [25]
    assert cache.insert(tokens(1), [31], [31]) == []
    assert cache.match(tokens(1, 5)).pages == (11, 25)
    assert sorted(cache.check()) == [11, 12, 25]


def test_match_changes_nothing() -> None:
    cache = cache_of()
    cache.insert(tokens(1, 2, 3), [11, 12, 13], [11, 12, 13])
    cache.insert(tokens(7), [17], [17])
    for _ in range(3):
        cache.match(tokens(1, 2))  # neither splits the node nor makes it the last one used
    assert cache.evict(3) == [13, 12, 11]


def test_leaves_go_from_the_tail_the_longest_unused_first() -> None:
    cache = cache_of()
    cache.insert(tokens(1, 2), [11, 12], [11, 12])
    cache.insert(tokens(7, 8), [17, 18], [17, 18])
    cache.lock(cache.match(tokens(1, 2))).release()  # used just now
    assert cache.evict(0) == []
    assert cache.evict(3) == [18, 17, 12]
    assert cache.check() == (11,)
    assert cache.evict(5) == [11]


def test_a_lock_keeps_its_path_also_when_the_path_is_split() -> None:
    cache = cache_of()
    cache.insert(tokens(1, 2, 3), [11, 12, 13], [11, 12, 13])
    lock = cache.lock(cache.match(tokens(1, 2, 3)))
    cache.insert(tokens(1, 5), [11, 15], [11, 15])
    assert cache.evict(9) == [15]
    lock.release()
    lock.release()
    cache.check()
    assert sorted(cache.evict(9)) == [11, 12, 13]
    assert cache.locks == 0


def test_a_page_that_tokens_do_not_fit_is_refused() -> None:
    with pytest.raises(EngineInconsistent):
        cache_of().insert(tokens(1)[:-1], [11], [11])


def test_check_walks_the_tree() -> None:
    cache = cache_of()
    cache.insert(tokens(1, 2), [11, 12], [11, 12])
    cache.insert(tokens(1, 3), [11, 13], [11, 13])
    cache.match(tokens(1, 3)).node.pages[0] = 12  # named twice now
    with pytest.raises(EngineInconsistent, match="2 different"):
        cache.check()


@pytest.mark.parametrize("seed", seeds(5, of=20))
def test_against_a_dictionary_of_prefixes(seed: int) -> None:
    draw = random.Random(seed)
    cache, known, page = cache_of(), dict[tuple[int, ...], int](), 0
    locked: list[tuple[Lock, tuple[int, ...]]] = []
    for _ in range(300):
        path = tuple(draw.randrange(3) for _ in range(draw.randrange(7)))
        expected = []
        while len(expected) < len(path) and (p := path[: len(expected) + 1]) in known:
            expected.append(known[p])
        match = cache.match(tokens(*path))
        assert match.pages == tuple(expected), f"seed {seed}"
        action = draw.randrange(4)
        if action == 0:
            pages = list(range(page, page + len(path)))
            page += len(path)
            assert cache.insert(tokens(*path), pages, pages) == pages[len(expected) :]
            for depth in range(len(expected), len(path)):
                known[path[: depth + 1]] = pages[depth]
        elif action == 1:
            whole = cache.match(tokens(*path[: len(expected)]))
            locked.append((cache.lock(whole), _whole_nodes(cache, path[: len(expected)])))
        elif action == 2 and locked:
            lock, _ = locked.pop(draw.randrange(len(locked)))
            lock.release()
        elif action == 3:
            kept = {path[:n] for _, path in locked for n in range(1, len(path) + 1)}
            gone = cache.evict(draw.randrange(4))
            for number in gone:
                (path,) = [path for path, known_page in known.items() if known_page == number]
                assert path not in kept
                assert not any(other[:-1] == path for other in known), "a head before its tail"
                del known[path]
        assert sorted(cache.check()) == sorted(known.values())
    for lock, _ in locked:
        lock.release()
    assert len(cache.evict(10_000)) == len(known)
    assert cache.pages == cache.locks == 0


def _whole_nodes(cache: RadixCache, path: tuple[int, ...]) -> tuple[int, ...]:
    """The part of a path that a lock keeps: up to the last node that is whole within it."""
    node, depth = cache.match(tokens(*path)).node, 0
    while node.parent is not None:
        depth += len(node.pages)
        node = node.parent
    return path[:depth]
