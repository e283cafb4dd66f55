"""The client among threads, forks, interrupts and the end of the interpreter; what importing it
loads.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest

import kvtier

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode


def test_many_threads_share_a_connection(ns, make_pages):
    failures = []

    def work(number):
        rng = random.Random(number)
        pages = make_pages(4, seed=number)
        for attempt in range(15):
            keys = [rng.randbytes(32) for _ in range(4)]
            if ns.put(keys, pages, chain=False).stored != 4 or ns.get(keys).pages != pages:
                failures.append((number, attempt))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []


def test_after_close_every_call_is_refused(daemon, layout):
    kv = kvtier.connect(daemon.url)
    ns = kv.namespace(layout)
    keys = ns.keys(range(4))
    kv.close()
    kv.close()
    calls = [kv.status, kv.ping, kv.capabilities, ns.reopen, ns.bump]
    calls += [lambda method=method: method(keys) for method in (ns.lookup, ns.get, ns.delete)]
    calls += [lambda: ns.put(keys, [bytes(1024)]), lambda: ns.lease(keys)]
    calls += [lambda: kv.namespace(layout), lambda: kv.__enter__()]
    for call in calls:
        with pytest.raises(kvtier.ClientClosed) as caught:
            call()
        assert caught.value.remedy
    assert daemon.calls["close_session"] == 1
    assert daemon.sessions == set()


def test_close_ends_calls_of_other_threads(daemon, layout):
    kv = kvtier.connect(daemon.url, deadline=30)
    ns = kv.namespace(layout)
    daemon.stall.update(("lookup", "get", "put"))
    keys = ns.keys(range(4))
    raised = []

    def wait(call):
        try:
            call()
        except kvtier.ClientClosed as error:
            raised.append(error)

    calls = [lambda: ns.lookup(keys), lambda: ns.get(keys)]
    calls.append(lambda: ns.put(keys, [bytes(1024)]))
    threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    while not all(daemon.calls[name] for name in ("lookup", "get", "put")):
        time.sleep(0.01)
    began = time.monotonic()
    kv.close()
    for thread in threads:
        thread.join(5)
    assert len(raised) == 3
    assert time.monotonic() - began < 3


def test_calls_that_begin_while_another_thread_closes(daemon, layout):
    """Each gives an outcome or ClientClosed; none waits for a loop that has ended."""
    for _ in range(15):
        kv = kvtier.connect(daemon.url, deadline=5)
        ns = kv.namespace(layout)
        keys = ns.keys(range(4))
        seen = []

        def call(ns=ns, keys=keys, seen=seen):
            try:
                while True:
                    seen.append(ns.lookup(keys).reasons)
            except kvtier.ClientClosed:
                seen.append("closed")

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        kv.close()
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
        assert seen.count("closed") == 4


def test_a_connection_may_be_dropped_in_its_own_thread(daemon, layout):
    kv = kvtier.connect(daemon.url, deadline=5)
    kv.namespace(layout)
    thread = kv._runner._thread
    holder = [kv]
    del kv
    began = time.monotonic()
    holder[0]._runner._loop.call_soon_threadsafe(holder.clear)
    thread.join(5)
    assert not thread.is_alive()
    assert time.monotonic() - began < 1
    assert daemon.sessions == set()


def test_nothing_is_left_behind(daemon, layout, make_pages):
    for _ in range(3):
        with kvtier.connect(daemon.url, deadline=5.0) as kv:
            ns = kv.namespace(layout)
            keys = ns.keys(range(8))
            ns.put(keys, make_pages(2))
            assert ns.get(keys).hits == 2
            with ns.lease(keys):
                pass


def test_a_connection_that_is_forgotten_closes_itself(daemon, layout):
    ns = kvtier.connect(daemon.url).namespace(layout)
    seen = weakref.ref(ns._connection)
    del ns
    gc.collect()
    assert seen() is None
    assert daemon.sessions == set()


def test_memory_of_the_caller_is_let_go(ns, layout, make_pages):
    keys = ns.keys(range(8))
    pages = bytearray(b"".join(make_pages(2)))
    ns.put(keys, pages)
    out = bytearray(2 * layout.raw_bytes)
    assert ns.get(keys, out=out).hits == 2
    assert out == pages
    # Memory that is still exported cannot change its size.
    pages.append(0)
    out.append(0)
    got = ns.get(keys)
    got.pages[0].append(0)


def in_child(work):
    """Runs `work` in a forked child that ends like a program; its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            code = work()
        except BaseException:  # the child must not return into pytest
            code = 99
            raise
        finally:
            gc.collect()
            os._exit(code)
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


def test_a_forked_child_is_refused_at_once_and_the_parent_goes_on(kv, ns, make_pages):
    pages = make_pages(2)
    keys = ns.keys(range(8))
    ns.put(keys, pages)

    def child():
        calls = [lambda: ns.get(keys), lambda: ns.lookup(keys), lambda: ns.put(keys, pages)]
        calls += [kv.status, lambda: ns.lease(keys), lambda: kv.namespace(ns.layout)]
        for number, call in enumerate(calls):
            began = time.monotonic()
            try:
                call()
            except kvtier.ForkedClient as error:
                if "child" not in str(error) or time.monotonic() - began > 1:
                    return 10 + number
            else:
                return 20 + number
        kv.close()
        return 0

    for _ in range(3):
        assert in_child(child) == 0
        assert ns.get(keys).pages == pages
    more = ns.keys(range(50, 58))
    assert ns.put(more, pages).stored == 2


SCRIPT = """
    import os, sys, kvtier
    url = sys.argv[1]
    segment = kvtier.Segment(name="k", role=kvtier.Role.KEY, dtype="bfloat16", layers=1, heads=1,
                             dim=32, scale_rule=kvtier.ScaleRule.NONE)
    layout = kvtier.Layout.from_segments([segment], model_id="m", revision="r", page_tokens=1,
                                         kv_compute="bfloat16")
    kv = kvtier.connect(url, deadline=2.0)
    ns = kv.namespace(layout)
    keys = ns.keys([1, 2])
    page = [bytes(64), bytes(64)]
"""


def run_script(daemon, body, **options):
    code = textwrap.dedent(SCRIPT) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code, daemon.url],
        capture_output=True,
        text=True,
        timeout=20,
        **options,
    )


def test_the_interpreter_ends_without_close(daemon):
    began = time.monotonic()
    done = run_script(daemon, "print(ns.put(keys, page).stored)")
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 10
    assert daemon.sessions == set()


def test_the_interpreter_ends_while_a_thread_waits_in_a_call(daemon):
    daemon.stall.add("lookup")
    done = run_script(
        daemon,
        """
        import threading, time
        wait = lambda: ns.lookup(keys, deadline=60)
        threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.5)
        print("end")
        """,
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_a_forked_child_may_end_like_a_program(daemon):
    done = run_script(
        daemon,
        """
        print(ns.put(keys, page).stored, flush=True)
        pid = os.fork()
        if pid == 0:
            try:
                ns.get(keys)
            except kvtier.ForkedClient:
                sys.exit(7)      # runs exit handlers and finalizers in the child
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        print(ns.get(keys).hits)
        """,
    )
    assert (done.returncode, done.stdout) == (0, "2\n7\n2\n"), done.stderr


def test_a_child_of_multiprocessing_can_connect_for_itself(daemon):
    done = run_script(
        daemon,
        """
        import multiprocessing
        ns.put(keys, page)

        def work(queue):
            try:
                ns.get(keys)
            except kvtier.ForkedClient:
                queue.put("forked")

        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=work, args=(queue,))
        child.start()
        print(queue.get(timeout=10))
        child.join(10)
        print(child.exitcode, ns.get(keys).hits)
        """,
    )
    assert (done.returncode, done.stdout) == (0, "forked\n0 2\n"), done.stderr


def test_an_interrupt_ends_the_call(daemon):
    daemon.stall.add("lookup")
    done = run_script(
        daemon,
        """
        import signal, threading, time
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        try:
            ns.lookup(keys, deadline=30)
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - began < 5)
        """,
    )
    assert (done.returncode, done.stdout) == (0, "interrupted True\n"), done.stderr


def loaded_by(statement):
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=30
    )
    return set(done.stdout.split())


def test_importing_kvtier_loads_nothing_heavy():
    loaded = loaded_by("import kvtier")
    assert not loaded & {"torch", "grpc", "google.protobuf", "numpy", "asyncio", "xxhash"}
    assert loaded_by("import kvtier; kvtier.Codec; kvtier.KvtierError").isdisjoint(
        {"torch", "grpc", "google.protobuf", "numpy"}
    )


def test_the_local_plane_is_there_without_grpc():
    loaded = loaded_by("import kvtier.client.local_attachment, kvtier.client.sync")
    assert "kvtier.client.local_put" in loaded
    assert not loaded & {"torch", "grpc", "google.protobuf", "numba"}


def test_a_client_without_tensors_does_not_load_torch(daemon):
    done = run_script(
        daemon,
        """
        assert ns.put(keys, page).stored == 2 and ns.get(keys).hits == 2
        with ns.lease(keys) as held:
            assert held.pages() == page
        print("torch" in sys.modules)
        """,
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_every_exported_name_is_there():
    assert kvtier.__all__ == sorted(kvtier.__all__)
    for name in kvtier.__all__:
        assert getattr(kvtier, name) is not None
    assert set(kvtier.__all__) <= set(dir(kvtier))
    with pytest.raises(AttributeError, match="colour"):
        _ = kvtier.colour
