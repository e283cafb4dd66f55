"""Calls in the middle of other calls of the same thread (a handler of a signal), and arguments that
are wrong in the same way by shared memory and over gRPC."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch

import kvtier
from kvtier.core.page import Codec, GetCode, PutCode
from kvtier.errors import InvalidConfigValue, LimitExceeded, PageSizeError
from tests.client.local_puts_rig import metrics, opened, remote, soon
from tests.client.local_rig import NBYTES, pages_of, separate_keys
from tests.forks import daemon_of_its_own
from tests.signals import interrupted

HANG_S = 50
METRICS = "daemon.metrics_listen=127.0.0.1:0"
MODULES = re.compile(r"/kvtier/(client|transfer/local|packing)/")
QUICK = {
    *(("lookup", "get"), ("lookup", "left"), ("get", "lookup"), ("get", "put")),
    *(("put", "put"), ("put", "flush"), ("left", "put")),
}


@pytest.fixture(scope="module")
def shared(forker):
    """One daemon for the tests that leave it as it was; each has a tenant of its own."""
    with daemon_of_its_own(forker, "host.bytes=192MiB", METRICS) as running:
        yield running


class Calls:
    """A lookup, get or put of right keys, whose answer is looked at."""

    def __init__(self, kv, ns):
        self.kv, self.ns = kv, ns
        self.known = separate_keys(ns, 0, 8)
        self.pages = pages_of(self.known, NBYTES)
        self.numbers = itertools.count(1000)
        ns.put(self.known, self.pages, chain=False).raise_for_refused()

    def lookup(self):
        assert self.ns.lookup(self.known).reasons == [GetCode.HIT] * 8

    def get(self):
        out = np.zeros((8, NBYTES), np.uint8)
        assert self.ns.get(self.known, out=out).reasons == [GetCode.HIT] * 8
        assert np.array_equal(out, self.pages)

    def put(self):
        keys = separate_keys(self.ns, 8 * next(self.numbers), 8)
        put = self.ns.put(keys, pages_of(keys, NBYTES), chain=False)
        assert put.reasons == [PutCode.STORED] * 8

    def left(self):
        """A put that is none for shared memory: gives back what was granted there for later."""
        keys = separate_keys(self.ns, 8 * next(self.numbers), 8)
        with suppress(kvtier.NotImplementedYet):  # without NVMe
            self.ns.put(keys, pages_of(keys, NBYTES), chain=False, durable="nvme")

    def flush(self):
        """By the connection's loop, which must wait for no lock of the thread that asks."""
        with suppress(kvtier.NotImplementedYet):  # without NVMe, after it has counted
            self.kv.flush()


@contextmanager
def watched():
    """Ends the process if its block does not end: a thread that waits for itself cannot be told."""
    ended = threading.Event()

    def watch():
        if not ended.wait(HANG_S):
            os.kill(os.getpid(), signal.SIGABRT)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


#: Outer and inner call: each of them, and pairs that once failed. `make soak` has the others.
NESTED = [
    pytest.param(outer, inner, marks=[] if (outer, inner) in QUICK else pytest.mark.soak)
    for outer in ("lookup", "get", "put", "left")
    for inner in ("lookup", "get", "put", "left", "flush")
]


@pytest.mark.parametrize(("outer", "inner"), NESTED)
def test_a_call_at_every_place_of_a_call(shared, outer, inner):
    """As a finalizer or the handler of a signal makes it, with any lock of the call held: once from
    every line of the client that calls something."""
    with opened(shared, tenant=f"places {outer} {inner}", deadline=30) as (kv, ns):
        calls = Calls(kv, ns)
        work, nested = getattr(calls, outer), getattr(calls, inner)
        work()
        nested()
        places = set()
        is_inside = False

        def look(frame, event, _):
            nonlocal is_inside
            place = (frame.f_code, frame.f_lineno, event)
            if is_inside or place in places or not MODULES.search(frame.f_code.co_filename):
                return
            places.add(place)
            is_inside = True
            nested()
            is_inside = False

        with watched():
            sys.setprofile(look)
            try:
                work()
            finally:
                sys.setprofile(None)
            work()
        assert len(places) > 60


@pytest.mark.parametrize("outer", ["get", "put", "left"])
def test_a_close_in_the_middle_of_a_call(shared, outer):
    """By the same thread: it ends, with what it did or as closed, and no slot stays granted."""
    ended = 0
    for place in range(0, 250, 24):
        with opened(shared, tenant=f"closed {outer} {place}", deadline=5) as (kv, ns):
            calls = Calls(kv, ns)
            work = getattr(calls, outer)
            work()
            left = itertools.count(place, -1)

            def look(frame, *_, left=left, kv=kv):
                if MODULES.search(frame.f_code.co_filename) and next(left) == 0:
                    sys.setprofile(None)
                    kv.close()

            with watched():
                sys.setprofile(look)
                try:
                    work()
                except kvtier.ClientClosed:
                    ended += 1
                finally:
                    sys.setprofile(None)
    assert ended
    name = 'kvtier_local_grant_bytes{{state="{}"}}'.format
    soon(lambda: [metrics(shared)[name(s)] for s in ("granted", "quarantined")] == [0, 0])


@pytest.mark.parametrize("inner", ["lookup", "get", "put"])
@pytest.mark.parametrize("outer", ["lookup", "get", "put"])
def test_a_handler_of_a_signal_calls_in_the_middle_of_a_call(shared, outer, inner):
    with opened(shared, tenant=f"nested {outer} {inner}", deadline=30) as (kv, ns):
        calls = Calls(kv, ns)
        work, nested = getattr(calls, outer), getattr(calls, inner)
        with watched(), interrupted(nested, pause_s=0.0007) as runs:
            until = time.monotonic() + 0.2
            while runs() <= 10 or time.monotonic() < until:
                work()


class Turncoat:
    """Another number each time that it is asked."""

    def __init__(self):
        self.numbers = itertools.chain([1], itertools.repeat(1 << 40))

    def __index__(self):
        return next(self.numbers)

    __int__ = __index__


@pytest.fixture(scope="module", params=["local", "grpc"])
def either(request, shared):
    """By shared memory, and over gRPC. One connection, for wrong arguments leave nothing behind."""
    with opened(shared, tenant="arguments") as (kv, ns):
        Calls(kv, ns).get()  # what a connection opens at its first calls is no test's
        if request.param == "local":
            yield kv, ns
        else:
            with remote(shared, ns) as far:
                yield kv, far


def test_a_place_is_looked_at_once(either):
    """What was checked is what is written to."""
    _, ns = either
    keys = separate_keys(ns, 0, 1)
    pages = pages_of(keys, NBYTES)
    ns.put(keys, pages, chain=False).raise_for_refused()
    pool = np.zeros((3, NBYTES), np.uint8)
    assert ns.get(keys, out=pool, at=[Turncoat()]).prefix == 1
    assert np.array_equal(pool[1], pages[0])
    assert not pool[0].any()
    assert not pool[2].any()


@pytest.mark.parametrize(
    "at",
    [5, 1.5, np.array(3), torch.tensor(3), object(), [np.array([1, 2])], [torch.tensor([1, 2])],
     torch.empty(1, dtype=torch.int64, device="meta"), [None], ["1"], [1.0], [-1], [3], [1 << 70]],
)  # fmt: skip
def test_places_that_are_none(either, at):
    _, ns = either
    with pytest.raises(PageSizeError):
        ns.get(separate_keys(ns, 0, 1), out=np.zeros((3, NBYTES), np.uint8), at=at)


@pytest.mark.parametrize("lossy_ok", [None, "x", [], 1])
def test_lossy_ok_is_a_truth_value(either, lossy_ok):
    _, ns = either
    with pytest.raises(LimitExceeded, match="lossy_ok"):
        ns.get(separate_keys(ns, 0, 1), lossy_ok=lossy_ok)


@pytest.mark.parametrize("deadline", [10**400, float("inf"), float("nan"), 0, -1, "1"])
def test_deadlines_that_are_none(either, deadline):
    _, ns = either
    keys = separate_keys(ns, 0, 1)
    for call in (
        lambda: ns.lookup(keys, deadline=deadline),
        lambda: ns.get(keys, deadline=deadline),
        lambda: ns.put(keys, pages_of(keys, NBYTES), deadline=deadline),
    ):
        with pytest.raises(InvalidConfigValue, match="deadline"):
            call()


@pytest.mark.parametrize("durable", [[], {}, None, "disk", 1])
def test_durabilities_that_are_none(either, durable):
    _, ns = either
    keys = separate_keys(ns, 0, 1)
    with pytest.raises(LimitExceeded, match="durable"):
        ns.put(keys, pages_of(keys, NBYTES), durable=durable)


@pytest.mark.parametrize(
    "wrong",
    [{"session": 0}, {"session": b""}, {"session": None}, {"session": "x" * 257},
     {"traceparent": 5}, {"traceparent": "é"}, {"traceparent": "0" * 100}],
    ids=str,
)  # fmt: skip
def test_what_a_lookup_is_told_is_checked(either, wrong):
    _, ns = either
    with pytest.raises(LimitExceeded):
        ns.lookup(separate_keys(ns, 0, 1), **wrong)


def test_true_is_a_priority_like_one(shared):
    """It must not cost the connection its way into shared memory."""
    with opened(shared, tenant="priority") as (kv, ns):
        keys = separate_keys(ns, 0, 1)
        assert ns.put(keys, pages_of(keys, NBYTES), priority=True).reasons == [PutCode.STORED]
        assert kv.local.not_writing == ""
        assert kv.local.puts.stored == 1


def test_an_unknown_name_is_said_before_memory_is_looked_at(either):
    _, ns = either
    with pytest.raises(TypeError, match="colour"):
        ns.get(separate_keys(ns, 0, 1), out=object(), colour=Codec.RAW)
    assert kvtier.Codec is Codec
