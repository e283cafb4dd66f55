"""Mooncake Store on one host, measured round by round (benchmarks/peers/rounds.py).

    .peers/mooncake/bin/python -m benchmarks.peers.mooncake_store shm|tcp [--checksum]

shm: this process is a client without memory of its own; a second process owns the memory and
shares it. tcp: the same, but bytes go through a loopback socket. Buffers are registered, and the
memory of both is written whole before the first round. `--checksum` turns Mooncake's own checksum
on, in every process. Ports are free ones. One thread.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.rounds import PAGE_BYTES, answers, ending, gbps, microseconds, serve

BIN = Path(sys.executable).parent
SEGMENT_BYTES = 1 << 30
#: What of the owner's memory is written before: above this much Mooncake begins to evict.
POPULATED = 0.8
LOCAL_BYTES = 256 << 20
LOOKUP_KEYS, LOOKUP_CALLS = 1000, 10
START_S_MAX = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args} ended with {process.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"{process.args} does not listen after {START_S_MAX:g} s")


def start(*command: str | Path) -> subprocess.Popen[bytes]:
    # stdout is for the answers.
    return subprocess.Popen(list(command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def check(is_right: bool, call: str) -> None:
    if not is_right:
        raise SystemExit(f"{call} failed")


class Store:
    """A client, its two registered buffers, and the pages in one of them."""

    def __init__(self, mode: str, pages: int, batch: int, seed: int) -> None:
        self.pages, self.batch = pages, batch
        self._draw = random.Random(seed)
        self._started: list[subprocess.Popen[bytes]] = []
        self._kept: np.ndarray | None = None
        master, total = free_port(), pages * PAGE_BYTES
        self._started.append(
            start(
                BIN / "mooncake_master",
                f"--rpc_port={master}",
                "--rpc_address=127.0.0.1",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={free_port()}",
                "--default_kv_lease_ttl=3000",
            )
        )
        until_listening(master, self._started[-1])
        address = f"127.0.0.1:{master}"
        connect = self._by_memory if mode == "shm" else self._by_socket
        self.store, self.source, self.target = connect(address, total)
        self.pattern = np.random.default_rng(seed).integers(0, 256, total, np.uint8)
        ctypes.memmove(self.source, self.pattern.ctypes.data, total)
        ctypes.memset(self.target, 1, total)
        for buffer in (self.source, self.target):
            check(self.store.register_buffer(buffer, total) == 0, "register_buffer")
        self._populate()

    def _by_memory(self, master: str, total: int) -> tuple[Any, int, int]:
        from mooncake.store import MooncakeDistributedStore

        port = free_port()
        self._started.append(
            start(
                BIN / "mooncake_client",
                f"--master_server_address={master}",
                "--host=127.0.0.1",
                f"--port={port}",
                "--protocol=tcp",
                "--metadata_server=P2PHANDSHAKE",
                f"--global_segment_size={SEGMENT_BYTES >> 20} MB",
                f"--local_buffer_size={LOCAL_BYTES >> 20}MB",
            )
        )
        until_listening(port, self._started[-1])
        store = MooncakeDistributedStore()
        done = store.setup_dummy(2 * total + LOCAL_BYTES, LOCAL_BYTES, f"127.0.0.1:{port}")
        check(done == 0, "setup_dummy")
        return store, store.alloc_from_mem_pool(total), store.alloc_from_mem_pool(total)

    def _by_socket(self, master: str, total: int) -> tuple[Any, int, int]:
        owner = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.mooncake_store", "owner", "--master", master],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._started.append(owner)
        assert owner.stdout is not None
        while b"ready" not in (line := owner.stdout.readline()):
            check(bool(line), "the process that owns the memory")
        store = set_up(master, segment_bytes=0)
        self._kept = np.zeros(2 * total, np.uint8)
        return store, self._kept.ctypes.data, self._kept.ctypes.data + total

    def _populate(self) -> None:
        for i in range(int(SEGMENT_BYTES * POPULATED) // PAGE_BYTES):
            at = self.source + i % self.pages * PAGE_BYTES
            check(self.store.put_from(f"fill/{i}", at, PAGE_BYTES) == 0, "put_from")
        self.store.remove_all(True)

    def round(self, number: int) -> Mapping[str, float]:
        order = list(range(self.pages))
        self._draw.shuffle(order)
        total = self.pages * PAGE_BYTES
        found: dict[str, float] = {}
        ctypes.memset(self.target, 1, total)
        keys = {i: f"{number}/{i}" for i in order}
        found["put-1"] = gbps(self._each(order, keys, self._put), total)
        found["get-1"] = gbps(self._each(order, keys, self._get), total)
        found["lookup-1-us"] = microseconds(self._each(order, keys, self._exists), len(order))
        asked = [keys[order[i % len(order)]] for i in range(LOOKUP_KEYS)]
        found[f"lookup-{LOOKUP_KEYS}-us"] = microseconds(
            lambda: [self.store.batch_is_exist(asked) for _ in range(LOOKUP_CALLS)], LOOKUP_CALLS
        )
        self._check_bytes(total)
        self.store.remove_all(True)
        calls = [order[at : at + self.batch] for at in range(0, len(order), self.batch)]
        found[f"put-{self.batch}"] = gbps(lambda: [self._put_many(c, keys) for c in calls], total)
        found[f"get-{self.batch}"] = gbps(lambda: [self._get_many(c, keys) for c in calls], total)
        self._check_bytes(total)
        self.store.remove_all(True)
        return found

    def _each(
        self, order: list[int], keys: dict[int, str], call: Callable[[str, int], None]
    ) -> Callable[[], None]:
        def work() -> None:
            for i in order:
                call(keys[i], i * PAGE_BYTES)

        return work

    def _put(self, key: str, at: int) -> None:
        check(self.store.put_from(key, self.source + at, PAGE_BYTES) == 0, "put_from")

    def _get(self, key: str, at: int) -> None:
        check(self.store.get_into(key, self.target + at, PAGE_BYTES) == PAGE_BYTES, "get_into")

    def _exists(self, key: str, _at: int) -> None:
        check(self.store.is_exist(key) == 1, "is_exist")

    def _put_many(self, some: list[int], keys: dict[int, str]) -> None:
        at = [self.source + i * PAGE_BYTES for i in some]
        sizes = [PAGE_BYTES] * len(some)
        done = self.store.batch_put_from([keys[i] for i in some], at, sizes)
        check(not any(done), "batch_put_from")

    def _get_many(self, some: list[int], keys: dict[int, str]) -> None:
        at = [self.target + i * PAGE_BYTES for i in some]
        sizes = [PAGE_BYTES] * len(some)
        done = self.store.batch_get_into([keys[i] for i in some], at, sizes)
        check(sum(done) == PAGE_BYTES * len(some), "batch_get_into")

    def _check_bytes(self, total: int) -> None:
        back = np.empty(total, np.uint8)
        ctypes.memmove(back.ctypes.data, self.target, total)
        check(np.array_equal(back, self.pattern), "comparing what came back")
        ctypes.memset(self.target, 1, total)

    def end(self) -> None:
        for process in reversed(self._started):
            process.kill()
            process.wait()


def set_up(master: str, *, segment_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    done = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BYTES, "tcp", "", master
    )  # fmt: skip
    check(done == 0, "setup")
    return store


def own(master: str) -> None:
    """Holds the memory until stdin ends."""
    _store = set_up(master, segment_bytes=SEGMENT_BYTES)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["shm", "tcp", "owner"])
    parser.add_argument("--checksum", action="store_true")
    parser.add_argument("--master")
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.checksum:
        os.environ["MOONCAKE_STORE_CHECKSUM"] = "1"
    with ending():
        if arguments.mode == "owner":
            own(arguments.master)
            return
        out = answers()
        store = Store(arguments.mode, arguments.pages, arguments.batch, arguments.seed)
        try:
            serve(out, version("mooncake-transfer-engine-non-cuda"), store.round)
        finally:
            store.end()


if __name__ == "__main__":
    main()
