"""Sessions: ids that mean one thing for one boot, bounded counts, an end that takes all along."""

from __future__ import annotations

import pytest

from kvtier.daemon.sessions import Sessions
from kvtier.errors import LimitExceeded, UnknownHandle


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ended() -> list[tuple[int, str]]:
    return []


@pytest.fixture
def gone() -> set[str]:
    """What was opened and has ended since."""
    return set()


@pytest.fixture
def sessions(clock, ended, gone) -> Sessions[str]:
    return Sessions(
        clock=clock,
        ttl_s=10.0,
        sessions_max=3,
        handles_per_session_max=2,
        on_end=lambda session, why: ended.append((session.session_id, why)),
        has_ended=lambda place: place in gone,
    )


def test_a_handle_leads_to_what_was_opened(sessions):
    session = sessions.begin("client")
    handle = sessions.open_handle(session, "place")
    assert sessions.handle(handle.handle_id).bound == "place"
    assert sessions.handle(handle.handle_id).session_id == session.session_id
    assert 0 < handle.handle_id < 1 << 64


def test_ids_are_random(sessions):
    session = sessions.begin("client")
    ids = [session.session_id, *(sessions.open_handle(session, place).handle_id for place in "xy")]
    assert len(set(ids)) == 3
    assert max(ids) > 1 << 50, "all small: not random"


def test_unknown_ids(sessions):
    session = sessions.begin("client")
    handle = sessions.open_handle(session, "place")
    with pytest.raises(UnknownHandle):
        sessions.session(session.session_id + 1)
    with pytest.raises(UnknownHandle):
        sessions.handle(handle.handle_id ^ 1)
    with pytest.raises(UnknownHandle):
        sessions.session(handle.handle_id)


def test_counts_are_bounded(sessions):
    first = sessions.begin("a")
    sessions.begin("b")
    sessions.begin("c")
    with pytest.raises(LimitExceeded, match=r"limits\.sessions_max"):
        sessions.begin("d")
    sessions.open_handle(first, "x")
    sessions.open_handle(first, "y")
    with pytest.raises(LimitExceeded, match=r"limits\.handles_per_session_max"):
        sessions.open_handle(first, "z")
    sessions.end(first.session_id, "closed")
    sessions.begin("d")


def test_handles_of_what_has_ended_take_no_place(sessions, gone):
    session = sessions.begin("client")
    handles = []
    for number in range(50):
        handles.append(sessions.open_handle(session, f"place {number}"))
        gone.add(f"place {number}")
    assert len(session.handles) <= 2
    assert sessions.handle_count <= 4
    # The last ones still say what they were for; those long gone are unknown.
    for handle in handles[-3:]:
        assert sessions.handle(handle.handle_id).bound == handle.bound
    with pytest.raises(UnknownHandle):
        sessions.handle(handles[0].handle_id)
    kept = sessions.open_handle(session, "kept")
    sessions.open_handle(session, "kept too")
    with pytest.raises(LimitExceeded, match=r"limits\.handles_per_session_max"):
        sessions.open_handle(session, "one too many")
    assert sessions.open_handle(session, "kept") is kept
    sessions.end(session.session_id, "closed")
    assert sessions.handle_count == 0


def test_ending_takes_the_handles_along_and_is_told_once(sessions, ended):
    session = sessions.begin("client")
    handle = sessions.open_handle(session, "place")
    assert sessions.end(session.session_id, "closed") is True
    assert sessions.end(session.session_id, "closed") is False
    assert ended == [(session.session_id, "closed")]
    with pytest.raises(UnknownHandle):
        sessions.handle(handle.handle_id)
    assert sessions.handle_count == 0


def test_idle_sessions_end_and_used_ones_stay(sessions, clock, ended):
    idle = sessions.begin("idle")
    used = sessions.begin("used")
    handle = sessions.open_handle(used, "place")
    clock.now += 9.0
    sessions.handle(handle.handle_id)
    clock.now += 1.0
    assert sessions.reap() == 1
    assert ended == [(idle.session_id, "idle")]
    clock.now += 8.9
    assert sessions.reap() == 0
    clock.now += 0.1
    assert sessions.reap() == 1


def test_a_call_under_way_holds_its_session(sessions, clock):
    session = sessions.begin("client")
    handle = sessions.open_handle(session, "place")
    with sessions.in_use(handle.handle_id):
        clock.now += 1000.0
        assert sessions.reap() == 0
        assert sessions.idle_s(session) == 0.0
    clock.now += 9.9
    assert sessions.reap() == 0
    clock.now += 0.1
    assert sessions.reap() == 1


def test_a_session_that_is_closed_under_a_call(sessions):
    session = sessions.begin("client")
    handle = sessions.open_handle(session, "place")
    with sessions.in_use(handle.handle_id) as held:
        sessions.end(session.session_id, "closed")
        assert held.bound == "place"
    assert len(sessions) == 0


def test_end_all(sessions, ended):
    for name in "abc":
        sessions.begin(name)
    sessions.end_all()
    assert len(sessions) == 0
    assert [why for _, why in ended] == ["stopped"] * 3
