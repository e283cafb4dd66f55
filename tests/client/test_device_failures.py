"""Offload and load with the daemon absent, killed or stopped: an outcome a page, in time, and the
pages are the engine's again.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import kvtier
from kvtier.client.device import DevicePool, PageTransfer
from kvtier.testing.held_stream import HeldStream
from tests.client.device_rig import fill
from tests.client.local_rig import attached, two_segments

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode

#: What a call may come to when nobody answers: who notices that the daemon has gone says so, who
#: does not waits for the deadline.
NO_ANSWER = {"TIMEOUT", "UNAVAILABLE"}


@pytest.fixture
def layout():
    """Pages of 64 KiB."""
    return two_segments(layers=8, heads=8, dim=64)


@pytest.fixture(params=["direct", "staged"])
def stream(request):
    return HeldStream(is_holding=False) if request.param == "staged" else None


def within(seconds, call):
    """What `call` gives. The slack is for machines that are slow, and far below a hang."""
    began = time.monotonic()
    result = call()
    took = time.monotonic() - began
    assert took < seconds + 5, f"took {took:.1f} s with a deadline of {seconds} s"
    return result


def names(result):
    return {reason.name for reason in result.reasons}


def test_absent(tmp_path, layout, stream):
    pool = DevicePool(layout, 4)
    with kvtier.connect(f"unix://{tmp_path}/none.sock", deadline=0.5) as kv:
        ns = kv.namespace(layout)
        ids = pool.allocate(4)
        with PageTransfer(pool, ns, stream=stream, deadline=0.5) as transfer:
            keys = ns.keys(range(16))
            put = within(0.5, lambda: transfer.offload(keys, ids))
            assert put.reasons == (PutCode.UNAVAILABLE,) * 4
            got = within(0.5, lambda: transfer.load(keys, ids))
            assert got.reasons == (GetCode.UNAVAILABLE,) * 4
            assert got.failed == (0, 1, 2, 3)
        pool.free(ids)
        assert pool.free_pages == 4


def test_no_more_threads(tmp_path, layout, stream, monkeypatch):
    """Work that an executor cannot begin stays in its queue: it would be done when a thread can be
    had again, over pages that somebody else has by then. So the threads are there from the start.
    """

    def refused(thread):
        raise RuntimeError("can't start new thread")

    pool = DevicePool(layout, 4)
    with kvtier.connect(f"unix://{tmp_path}/none.sock", deadline=0.5) as kv:
        ns = kv.namespace(layout)
        ids, keys = pool.allocate(4), ns.keys(range(16))
        with PageTransfer(pool, ns, stream=stream, deadline=0.5) as transfer:
            monkeypatch.setattr(threading.Thread, "start", refused)
            begun = [transfer.start_load(keys[:2], ids[:2])]
            begun += [transfer.start_offload(keys[2:], ids[2:])]
            assert [names(one.wait(20)) <= NO_ANSWER for one in begun] == [True, True]
            monkeypatch.undo()
        pool.free(ids)
        assert pool.free_pages == 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_in_the_middle_of_the_work(process, layout, stream, number):
    """The daemon goes between two calls. Nothing is written into a page after its load has ended:
    the page goes to another request at once, and keeps what that one writes.
    """
    pool = DevicePool(layout, 8)
    with kvtier.connect(process.url, deadline=20) as kv:
        ns = kv.namespace(layout)
        attached(kv)
        with PageTransfer(pool, ns, stream=stream, deadline=20) as transfer:
            ids = pool.allocate(8)
            pages = fill(pool, ids, 1)
            keys = ns.keys(range(32))
            assert transfer.offload(keys[:4], ids[:4]).stored == 4
            assert transfer.load(keys[:4], ids[:4]).hits == 4
            if number is signal.SIGKILL:
                process.kill()
            else:
                process.signal(number)
            try:
                put = within(0.4, lambda: transfer.offload(keys[4:], ids[4:], deadline=0.4))
                assert names(put) <= NO_ANSWER | {"STORED"}
                load = transfer.start_load(keys, ids, deadline=0.4)
                got = within(0.4, load.wait)
                # Shared memory of a stopped daemon can still be read; what counts was verified.
                assert names(got) <= NO_ANSWER | {"HIT", "MISS"}
                for place, page, reason in zip(ids, pages, got.reasons, strict=True):
                    if reason is GetCode.HIT:
                        assert torch.equal(pool.kv[place], page)
                pool.free(ids)
                assert pool.occupancy.draining == 0
                theirs = pool.allocate(8)
                fresh = fill(pool, theirs, 2)
            finally:
                if number is signal.SIGSTOP:
                    os.kill(process.pid, signal.SIGCONT)
            if number is signal.SIGSTOP:
                assert comes_back(lambda: transfer.load(keys[:4], theirs[:4]).hits == 4)
            assert torch.equal(pool.kv[theirs[4:]], fresh[4:])
    pool.check()


def comes_back(call, seconds=20.0):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if call():
            return True
        time.sleep(0.02)
    return False


def test_a_forked_child_is_told_so(ns):
    pool = DevicePool(ns.layout, 2)
    with PageTransfer(pool, ns) as transfer:
        ids = pool.allocate(2)
        keys = ns.keys(range(8))
        child = os.fork()
        if child == 0:
            try:
                transfer.load(keys, ids)
            except kvtier.ForkedClient:
                transfer.close()
                os._exit(7)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert transfer.offload(keys, ids).stored == 2
