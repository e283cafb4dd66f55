"""The local plane when something goes wrong: damage, ends, forks, and many at once."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvtier
from kvtier.client.local_link import LocalLink
from kvtier.transfer.local.frames import VERSION, Hello, encode
from tests.client.local_rig import NBYTES, arena_fd, attached, flip, opaque, pages_of, separate_keys
from tests.forks import ForkedDaemon

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode


@pytest.mark.parametrize("at", [0, 1, NBYTES // 2, NBYTES - 1])
def test_a_flipped_byte_is_never_a_hit_and_is_condemned(process, local_kv, local_ns, at):
    keys = local_ns.keys(range(3))
    pages = pages_of(keys, NBYTES)
    put = local_ns.put(keys, pages)
    flip(process.pid, put[1].ref.slot, at)
    out = np.zeros_like(pages)
    got = local_ns.get(keys, out=out)
    assert got.reasons == [GetCode.HIT, GetCode.CORRUPT, GetCode.HIT]
    assert np.array_equal(out[[0, 2]], pages[[0, 2]])
    assert local_kv.local.counts.sums_failed == 1
    assert local_kv.status().counters["condemned"] == 1
    assert local_ns.get(keys).reasons == [GetCode.HIT, GetCode.MISS, GetCode.HIT]
    local_ns.put(keys[1:2], pages[1:2]).raise_for_refused()
    assert local_ns.get(keys).prefix == 3


def test_verify_off_does_not_serve_damage_here(process):
    with kvtier.connect(process.url, deadline=10, verify="off") as kv:
        ns = kv.namespace(opaque(NBYTES))
        attached(kv)
        keys = ns.keys(range(1))
        put = ns.put(keys, pages_of(keys, NBYTES))
        flip(process.pid, put[0].ref.slot, 5)
        assert ns.get(keys).reasons == [GetCode.CORRUPT]


def test_a_whole_arena_of_noise_gives_no_hit(process, local_kv, local_ns):
    """Whatever the memory holds: no crash, no wrong page."""
    keys = local_ns.keys(range(64))
    local_ns.put(keys, pages_of(keys, NBYTES)).raise_for_refused()
    fd = arena_fd(process.pid)
    noise = random.Random(7).randbytes(1 << 20)
    for place in range(0, os.fstat(fd).st_size, len(noise)):
        os.pwrite(fd, noise, place)
    os.close(fd)
    assert local_ns.get(keys).hits == 0
    assert local_ns.put(keys, pages_of(keys, NBYTES)).stored == 64
    assert local_ns.get(keys).prefix == 64


def test_a_killed_daemon_is_unavailable_and_the_next_one_is_attached_to(
    process, local_kv, local_ns
):
    keys = local_ns.keys(range(4))
    pages = pages_of(keys, NBYTES)
    local_ns.put(keys, pages).raise_for_refused()
    assert local_ns.get(keys).prefix == 4
    process.kill()
    assert local_ns.get(keys).hits == 0
    assert local_ns.lookup(keys).hits == 0
    state = local_kv.local
    assert not state.is_attached
    assert "ended" in state.reason
    process.start()
    deadline = time.monotonic() + 10
    while not local_ns.put(keys, pages).stored:
        assert time.monotonic() < deadline
    attached(local_kv)
    before = local_kv.local.counts.hits
    assert local_ns.get(keys).prefix == 4
    assert local_kv.local.counts.hits - before == 4


def in_child(ns, queue):
    try:
        ns.get([bytes(32)])
    except kvtier.errors.ForkedClient as error:
        queue.put(type(error).__name__)


def test_a_forked_child_is_refused_and_the_parent_goes_on(local_ns):
    keys = local_ns.keys(range(2))
    local_ns.put(keys, pages_of(keys, NBYTES)).raise_for_refused()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=in_child, args=(local_ns, queue))
    child.start()
    child.join(10)
    assert child.exitcode == 0
    assert queue.get() == "ForkedClient"
    queue.close()
    child.close()
    assert local_ns.get(keys).prefix == 2


def test_many_threads_read_while_pages_come_and_go(process, local_kv, local_ns):
    """Every hit is the page that was asked for; what was evicted meanwhile is a miss."""
    keys = separate_keys(local_ns, 0, 1200)
    for at in range(0, len(keys), 100):
        local_ns.put(keys[at : at + 100], pages_of(keys[at : at + 100], NBYTES), chain=False)
    is_over = threading.Event()
    wrong: list[str] = []
    hits = [0] * 3

    def read(number: int) -> None:
        rng = random.Random(number)
        out = np.zeros((16, NBYTES), np.uint8)
        while not is_over.is_set():
            some = rng.sample(keys, 16)
            got = local_ns.get(some, out=out)
            expected = pages_of(some, NBYTES)
            for i in range(16):
                if got[i].reason is GetCode.HIT:
                    hits[number] += 1
                    if not np.array_equal(out[i], expected[i]):
                        wrong.append(f"thread {number}: {some[i].hex()}")

    threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        deadline = time.monotonic() + 2
        rng = random.Random(9)
        while time.monotonic() < deadline:
            some = rng.sample(keys, 32)
            local_ns.put(some, pages_of(some, NBYTES), chain=False)
            if rng.random() < 0.2:
                local_ns.delete(rng.sample(keys, 8))
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert min(hits) > 0
    assert local_kv.status().counters["evicted"] > 0
    assert local_kv.local.counts.hits == sum(hits)


def test_closing_while_others_read(process):
    kv = kvtier.connect(process.url, deadline=10)
    ns = kv.namespace(opaque(NBYTES))
    attached(kv)
    keys = ns.keys(range(64))
    ns.put(keys, pages_of(keys, NBYTES)).raise_for_refused()
    ended: list[str] = []

    def read() -> None:
        try:
            while True:
                assert ns.get(keys).hits in (0, 64)
        except kvtier.errors.ClientClosed:
            ended.append("closed")

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    kv.close()
    for thread in threads:
        thread.join(10)
    assert ended == ["closed"] * 3


def test_a_socket_that_is_somebody_elses_is_not_trusted(process, tmp_path: Path, forker):
    """The daemon says where its socket is; what answers there must be of its boot."""
    with ForkedDaemon(forker, tmp_path, "host.bytes=64MiB") as other:
        with kvtier.connect(other.url, deadline=10) as kv:
            path = kv.capabilities().local_socket
            boot_id = kv.status().boot_id
        LocalLink.attach(path, boot_id=boot_id, client_name="test").close()
        with pytest.raises(kvtier.errors.DaemonUnavailable, match="boot"):
            LocalLink.attach(path, boot_id=boot_id + 1, client_name="test")
    with pytest.raises(kvtier.errors.DaemonUnavailable):
        LocalLink.attach(path, boot_id=boot_id, client_name="test")


def arena_maps() -> int:
    return Path("/proc/self/maps").read_text(encoding="ascii").count("memfd:kvtier")


def test_the_memory_of_a_daemon_that_ended_is_let_go_of_while_nobody_calls(
    process, local_kv, local_ns
):
    """Else the next daemon would find its memory taken."""
    assert arena_maps() == 2
    process.kill()
    deadline = time.monotonic() + 5
    while arena_maps():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert local_kv.local.reason == "the daemon has ended"
    assert local_ns.get([bytes(32)]).reasons == [GetCode.UNAVAILABLE]


def test_who_was_refused_tries_again(tmp_path, forker):
    with ForkedDaemon(forker, tmp_path, "host.bytes=64MiB", "limits.sessions_max=1") as process:
        path = process.url.removeprefix("unix://") + ".local"
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as second,
            kvtier.connect(process.url, deadline=10) as kv,
        ):
            for taken in (first, second):
                taken.connect(path)
                taken.send(encode(Hello(version=VERSION, client="test", writes=0)))
                assert taken.recv(1 << 16)
            ns = kv.namespace(opaque(NBYTES))
            deadline = time.monotonic() + 60
            while "sessions_max" not in kv.local.reason:
                assert time.monotonic() < deadline, kv.local.reason
                time.sleep(0.01)
            second.close()
            while not kv.local.is_attached:
                assert time.monotonic() < deadline, kv.local.reason
                ns.lookup([bytes(32)])
                time.sleep(0.05)


def test_a_fork_while_the_parent_attaches_does_not_hang_the_child(process):
    """What the parent loads is loaded when the child begins."""
    for delay in (0.0, 0.05, 0.2):
        done = subprocess.run(
            [sys.executable, "-c", FORK, process.url, str(delay)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


#: A child that loads what its parent was loading when it forked.
FORK = """
import os, sys, time, kvtier
from tests.client.local_rig import NBYTES, opaque
kv = kvtier.connect(sys.argv[1], deadline=20)
ns = kv.namespace(opaque(NBYTES))
time.sleep(float(sys.argv[2]))
child = os.fork()
if child == 0:
    from kvtier.packing.bulk_sums import load_summer
    from kvtier.transfer.local.loading import load_kernels
    load_kernels(), load_summer()
    os._exit(0)
limit = time.monotonic() + 40
while os.waitpid(child, os.WNOHANG) == (0, 0):
    if time.monotonic() > limit:
        os.kill(child, 9)
        raise SystemExit("the child hangs")
    time.sleep(0.01)
print("done", flush=True)
kv.close()
"""


def test_a_forked_child_does_not_keep_the_parents_place(tmp_path, forker):
    with ForkedDaemon(forker, tmp_path, "host.bytes=64MiB", "daemon.metrics_listen=") as process:
        kv = kvtier.connect(process.url, deadline=10)
        kv.namespace(opaque(NBYTES))
        attached(kv)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        process.wait_logged("event=local.attached")
        kv.close()
        with kvtier.connect(process.url, deadline=10, plane="grpc") as other:
            deadline = time.monotonic() + 5
            while clients_of(process):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert other.ping() > 0
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)


def clients_of(process: ForkedDaemon) -> int:
    """Connections to the control socket, as the kernel lists them."""
    path = process.url.removeprefix("unix://") + ".local"
    lines = Path("/proc/net/unix").read_text(encoding="ascii").splitlines()
    # 03: connected; the listening one is 01.
    return sum(line.endswith(path) and line.split()[5] == "03" for line in lines)
