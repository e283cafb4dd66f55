"""What is stored, found and ended by a store while its weights are updated, with a real daemon."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest
from pool_rig import IDENTITY, hashes, pool_with_heads, store_for

import kvtier
import kvtier.client
from kvtier_sglang import runs
from kvtier_sglang.layouts import Ranks, part_layouts
from kvtier_sglang.leaving import Leaving, Left
from kvtier_sglang.pools import shape_of
from kvtier_sglang.store import StoreState
from tests.forks import daemon_of_its_own

#: For what the daemon or a thread does soon.
WAIT_S = 60.0


@pytest.fixture
def store(kv):
    return store_for(kv, pool_with_heads("page_first_direct"))


def pages_of(kv):
    found: dict[str, int] = {}
    for item in kv.status().namespaces:
        found[item.weights_revision] = found.get(item.weights_revision, 0) + item.pages
    return found


def test_paused_everything_is_a_miss(store):
    store.set(hashes(2), [0, 1])
    store.pause()
    assert store.exists(hashes(2)) == 0
    assert store.get(hashes(2), [0, 1]) == [False, False]
    assert store.set(hashes(2, prompt=1), [0, 1]) == [False, False]
    store.resume("r1")
    assert store.exists(hashes(2)) == 2
    assert store.exists(hashes(2, prompt=1)) == 0


def test_pages_of_other_weights_are_not_found_and_their_generation_ends(kv, store):
    replica = store_for(kv, pool_with_heads("page_first_direct"))
    store.set(hashes(2), [0, 1])
    store.pause()
    store.resume("r2")
    assert store.exists(hashes(2)) == 0
    assert pages_of(kv) == {"r1": 0, "r2": 0}
    assert store.set(hashes(2, prompt=1), [0, 1]) == [True, True]
    # One that still has the old weights goes on by itself, and neither finds the other's pages.
    assert replica.exists(hashes(2, prompt=1)) == 0
    assert replica.set(hashes(1, prompt=2), [0]) == [True]
    assert replica.exists(hashes(1, prompt=2)) == 1
    assert store.exists(hashes(1, prompt=2)) == 0
    replica.resume("r2")
    assert replica.exists(hashes(2, prompt=1)) == 2


def test_going_back_finds_nothing_of_before(kv, store):
    store.set(hashes(2), [0, 1])
    for weights in ("r2", "r1"):
        store.resume(weights)
        assert store.exists(hashes(2)) == 0
    assert store.set(hashes(2), [0, 1]) == [True, True]


def test_many_updates_leave_two_families(kv, store):
    for number in range(2, 12):
        store.set(hashes(2), [0, 1])
        store.resume(f"r{number}")
    assert pages_of(kv) == {"r10": 0, "r11": 0}


def test_updates_without_end_need_no_more_handles(forker):
    with (
        daemon_of_its_own(
            forker, "host.bytes=64MiB", "limits.handles_per_session_max=8"
        ) as running,
        kvtier.connect(running.url, deadline=5) as kv,
    ):
        store = store_for(kv, pool_with_heads("page_first_direct"))
        for number in range(2, 52):
            store.resume(f"r{number}")
            assert store.set(hashes(1), [0]) == [True], f"update {number}"
            assert store.exists(hashes(1)) == 1
        assert pages_of(kv) == {"r50": 0, "r51": 2}


def test_ranks_that_are_updated_in_turn_meet_again(kv):
    pool = pool_with_heads("page_first_direct")
    ranks = [store_for(kv, pool, ranks=Ranks(tp_rank=rank, tp_size=2)) for rank in range(2)]
    for weights in ("r2", "r3", "r1"):
        for rank in ranks:
            rank.set(hashes(2), [0, 1])
        for rank in ranks:
            rank.pause()
        for rank in ranks:
            rank.resume(weights)
            assert rank.exists(hashes(2)) == 0
        assert [rank.set(hashes(2), [0, 1]) for rank in ranks] == [[True] * 2] * 2
        assert [rank.exists(hashes(2)) for rank in ranks] == [2, 2]


def wait_for(is_there):
    until, pause = time.monotonic() + WAIT_S, threading.Event()
    while not is_there():
        assert time.monotonic() < until
        pause.wait(0.02)


def generations_of(kv, weights):
    found = kv.status().namespaces
    return [item.generation for item in found if item.weights_revision == weights]


def test_without_a_daemon_an_update_is_over_in_time_and_nothing_old_is_found(kv, daemon, store):
    daemon.kill()
    store.pause()
    store.resume("r2")
    assert store.exists(hashes(2)) == 0
    daemon.start()
    wait_for(lambda: all(store.set(hashes(2), [0, 1])))
    assert store.exists(hashes(2)) == 2
    assert pages_of(kv) == {"r1": 0, "r2": 4}


def test_what_could_not_be_ended_is_when_the_daemon_is_back(kv, daemon, store):
    assert generations_of(kv, "r1") == [1, 1]
    daemon.kill()
    store.resume("r2")
    store.resume("r1")
    assert store.state is StoreState.WAITING, "pages of before may be there"
    assert store.set(hashes(2), [0, 1]) == [False, False]
    daemon.start()
    wait_for(lambda: all(store.set(hashes(2), [0, 1])))
    assert store.state is StoreState.OPEN
    assert generations_of(kv, "r1") == [2, 2]
    store.resume("r3")
    assert generations_of(kv, "r1") == [3, 3]


def test_one_update_of_many_ranks_and_servers_ends_one_generation(kv):
    """In turn, and whoever is not updated yet goes on storing."""
    pool = pool_with_heads("page_first_direct")
    ranks = [
        store_for(kv, pool, ranks=Ranks(tp_rank=rank, tp_size=2))
        for _ in range(3)
        for rank in (0, 1)
    ]
    for number, rank in enumerate(ranks):
        for waiting in ranks[number:]:
            wait_for(lambda waiting=waiting: all(waiting.set(hashes(2), [0, 1])))
        rank.resume("r2")
        assert generations_of(kv, "r1") == [2, 2]
        assert rank.set(hashes(2), [0, 1]) == [True, True]
    for rank in ranks:
        rank.resume("r1")
    assert generations_of(kv, "r2") == [2, 2]
    for rank in ranks:
        rank.resume("r2")
    assert generations_of(kv, "r1") == [3, 3], "another update, with the same names"


def test_a_resume_that_is_refused_is_tried_again(kv, store):
    layout = replace(store._layouts[0], weights_revision="r2")
    kv.namespace(layout)
    kv.bump_namespace(layout, "others")
    store.resume("r2")
    assert store.state is StoreState.WAITING
    assert store.set(hashes(2), [0, 1]) == [False, False]
    kv.bump_namespace(layout, "r2")
    wait_for(lambda: all(store.set(hashes(2), [0, 1])))
    assert store.state is StoreState.OPEN
    assert store.exists(hashes(2)) == 2
    store.pause()
    assert store.state is StoreState.PAUSED


def test_a_resume_without_a_free_handle_is_tried_again(forker):
    with (
        daemon_of_its_own(forker, "host.bytes=64MiB", "limits.namespaces_max=4") as running,
        kvtier.connect(running.url, deadline=5) as kv,
    ):
        store = store_for(kv, pool_with_heads("page_first_direct"))
        others = [replace(store._layouts[0], model_id=f"m{number}") for number in range(2)]
        for layout in others:
            kv.namespace(layout)
        store.resume("r2")
        assert store.state is StoreState.WAITING
        for layout in others:
            kv.delete_namespace(layout)
        wait_for(lambda: all(store.set(hashes(2), [0, 1])))


class Failing:
    """A connection whose calls fail for some layouts, and are written down."""

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self.done: list[tuple[str, str]] = []

    def bump_namespace(self, layout, *, expected, token, **_options):
        self._do("bump", layout)

    def delete_namespace(self, layout, **_options):
        self._do("delete", layout)

    def _do(self, what, layout):
        if layout.model_id in self.fails:
            raise kvtier.DaemonUnavailable("no", remedy="none")
        self.done.append((what, f"{layout.model_id} {layout.weights_revision}"))


def layouts_of(weights):
    parts = part_layouts(shape_of(pool_with_heads("page_first_direct")), IDENTITY, Ranks())
    return [
        replace(part.layout, model_id=f"m{part.buffer}", weights_revision=weights) for part in parts
    ]


def leave(leaving, weights, to_revision):
    families = [
        Left(layout=layout, first_generation=1, generation=1) for layout in layouts_of(weights)
    ]
    leaving.leave(families, to_revision=to_revision, deadline=5)


def test_each_family_is_left_by_itself_and_what_failed_is_owed():
    connection = Failing()
    leaving = Leaving(connection, tenant="t", salt=b"")
    connection.fails = {"m0"}
    leave(leaving, "r1", "r2")
    assert connection.done == [("bump", "m1 r1")]
    assert leaving.owes(layouts_of("r1"))
    assert not leaving.owes(layouts_of("r2"))
    leave(leaving, "r2", "r3")
    assert connection.done[1:] == [("bump", "m1 r2"), ("delete", "m1 r1")]
    connection.fails = set()
    leaving.settle(5)
    assert connection.done[3:] == [("bump", "m0 r1"), ("bump", "m0 r2"), ("delete", "m0 r1")]
    assert leaving.is_settled
    leaving.settle(5)
    assert len(connection.done) == 6


def test_what_is_owed_is_bounded():
    connection = Failing()
    connection.fails = {"m0", "m1"}
    leaving = Leaving(connection, tenant="t", salt=b"")
    for number in range(100):
        leave(leaving, f"r{number}", f"r{number + 1}")
    assert leaving.owes(layouts_of("r99"))
    connection.fails = set()
    leaving.settle(5)
    assert leaving.is_settled
    assert len(connection.done) == 128


class Hold:
    """Holds one thread before or after one of its calls."""

    def __init__(self, after: int, *, is_before: bool) -> None:
        self._left = after
        self.is_before = is_before
        self.entered, self.go = threading.Event(), threading.Event()

    def passes(self) -> None:
        self._left -= 1
        if self._left == -1:
            self.entered.set()
            assert self.go.wait(WAIT_S)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))]
)
def test_what_is_stored_while_weights_change_keeps_its_name(kv, seed, monkeypatch):
    """An update comes at any moment of a set, which goes on before, while or after the new weights
    are stored. A page names the weights that it was made with by its bytes.
    """
    chance = random.Random(seed)
    monkeypatch.setattr(runs, "_RUN_BYTES", 1)  # page by page
    pool = pool_with_heads("page_first_direct", pages=16)
    holds: dict[threading.Thread, Hold] = {}
    put = kvtier.client.Namespace.put

    def held(*args, **options):
        hold = holds.get(threading.current_thread())
        if hold and hold.is_before:
            hold.passes()
        result = put(*args, **options)
        if hold and not hold.is_before:
            hold.passes()
        return result

    monkeypatch.setattr(kvtier.client.Namespace, "put", held)
    store = store_for(kv, pool)

    def pages_made_by(number):
        places = [8 * (number % 2) + place for place in range(8)]
        pool.kv_buffer[:, places] = number
        return places

    before = pages_made_by(1)
    for number in range(2, 7):
        # Two parts a page: sometimes in the middle of one.
        hold = Hold(chance.randrange(16), is_before=chance.random() < 0.3)
        writer = threading.Thread(target=store.set, args=(hashes(8), before))
        holds[writer] = hold
        writer.start()
        assert hold.entered.wait(WAIT_S)
        store.pause()
        goes_on = chance.choice(["at once", "after the resume", "after the next set"])
        if goes_on == "at once":
            hold.go.set()
        store.resume(f"r{number}")
        if goes_on == "after the resume":
            hold.go.set()
            writer.join()
        after = pages_made_by(number)
        assert store.set(hashes(8), after) == [True] * 8
        hold.go.set()
        writer.join()
        assert bytes_under(kv, number) == [number] * 8
        assert set(bytes_under(kv, number - 1)) <= {number - 1, None}
        before = after


def bytes_under(kv, number):
    """Of each page that is found under these weights the number that it is full of, else None."""
    reader = pool_with_heads("page_first_direct")
    found = store_for(kv, reader, identity=replace(IDENTITY, weights_revision=f"r{number}")).get(
        hashes(8), list(range(8))
    )
    numbers = []
    for place, is_hit in enumerate(found):
        values = reader.kv_buffer[:, place].unique().tolist()
        assert not is_hit or len(values) == 1
        numbers.append(int(values[0]) if is_hit else None)
    return numbers
