"""LMCache's storage manager on one host, measured round by round (benchmarks/peers/rounds.py).

    .peers/lmcache/bin/python -m benchmarks.peers.lmcache_store cpu|disk|remote [--dir DIR]

The manager is used as LMCache's engine does: a put allocates an object in its memory, copies the
page into it and hands it over, and is done when no backend works on it any more; a get returns an
object, which is copied out and let go of. cpu: everything in this process. disk: files, through the
page cache. remote: LMCache's own server, a second process, over a loopback socket. The manager's
memory is written whole before the first round. One thread, beside LMCache's own.
"""

from __future__ import annotations

import argparse
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

from benchmarks.peers.rounds import PAGE_BYTES, answers, ending, gbps, microseconds, serve

LAYERS, TOKENS, HEADS, DIM = 16, 256, 2, 64  # k and v in bfloat16: 2 MiB
SHAPE = torch.Size([2, LAYERS, TOKENS, HEADS * DIM])
DTYPE = torch.bfloat16
MEMORY_GIB, DISK_GIB = 0.5, 2.0
START_S_MAX, PUT_S_MAX = 60.0, 60.0


class Store:
    def __init__(self, settings: dict[str, object], pages: int, batch: int, seed: int) -> None:
        self.pages, self.batch = pages, batch
        self._draw = random.Random(seed)
        self.manager = StorageManager(
            LMCacheEngineConfig.from_defaults(
                chunk_size=TOKENS, max_local_cpu_size=MEMORY_GIB, **settings
            ),
            LMCacheMetadata(
                model_name="bench",
                world_size=1,
                local_world_size=1,
                worker_id=0,
                local_worker_id=0,
                kv_dtype=DTYPE,
                kv_shape=(LAYERS, 2, TOKENS, HEADS, DIM),
            ),
            EventManager(),
        )
        self._is_remote = "remote_url" in settings
        # Named in every call: the manager asks its own memory first, and may answer from there.
        self._place, self._backend = list(self.manager.storage_backends.items())[-1]
        generator = torch.Generator().manual_seed(seed)
        self.source = torch.randn((pages, *SHAPE), generator=generator).to(DTYPE)
        self.target = torch.ones_like(self.source)
        self._populate()

    def _populate(self) -> None:
        held = []
        while (found := self._allocated(is_waiting=False)) is not None:
            found.tensor.fill_(1)
            held.append(found)
        for one in held:
            one.ref_count_down()

    def _allocated(self, *, is_waiting: bool = True) -> object:
        return self.manager.allocate(
            SHAPE, DTYPE, fmt=MemoryFormat.KV_2LTD, eviction=is_waiting, busy_loop=is_waiting
        )

    def _key(self) -> CacheEngineKey:
        return CacheEngineKey(
            model_name="bench",
            world_size=1,
            worker_id=0,
            chunk_hash=self._draw.getrandbits(63),
            dtype=DTYPE,
        )

    def round(self, _number: int) -> Mapping[str, float]:
        order = list(range(self.pages))
        self._draw.shuffle(order)
        total = self.pages * PAGE_BYTES
        found: dict[str, float] = {}
        for batch in (1, self.batch):
            calls = [order[at : at + batch] for at in range(0, len(order), batch)]
            keys = {i: self._key() for i in order}
            found[f"put-{batch}"] = gbps(lambda c=calls, k=keys: self._put_all(c, k), total)
            found[f"get-{batch}"] = gbps(lambda c=calls, k=keys: self._get_all(c, k), total)
            if not torch.equal(self.source, self.target):
                raise SystemExit("what came back differs")
            self.target.fill_(1)
            if batch == 1:
                found["lookup-1-us"] = microseconds(lambda k=keys: self._look(k), len(keys))
            self.manager.batched_remove(list(keys.values()))
        return found

    def _put_all(self, calls: list[list[int]], keys: dict[int, CacheEngineKey]) -> None:
        for some in calls:
            objects = []
            for i in some:
                one = self._allocated()
                one.tensor.copy_(self.source[i])
                objects.append(one)
            self.manager.batched_put([keys[i] for i in some], objects)
        deadline = time.monotonic() + PUT_S_MAX
        while not all(map(self._is_done, keys.values())):
            if time.monotonic() > deadline:
                raise SystemExit(f"a put is not done after {PUT_S_MAX:g} s")
            time.sleep(0.0005)

    def _is_done(self, key: CacheEngineKey) -> bool:
        if self._backend.exists_in_put_tasks(key):
            return False
        # A file's task may not have begun yet. To ask the server costs a round trip; its tasks are
        # listed from the beginning.
        return self._is_remote or self._backend.contains(key)

    def _get_all(self, calls: list[list[int]], keys: dict[int, CacheEngineKey]) -> None:
        for some in calls:
            for i, one in zip(some, self._got([keys[i] for i in some]), strict=True):
                if one is None:
                    raise SystemExit("a page that was put is not there")
                self.target[i].copy_(one.tensor.view(SHAPE))
                one.ref_count_down()

    def _look(self, keys: dict[int, CacheEngineKey]) -> None:
        for key in keys.values():
            if self.manager.contains(key, [self._place]) != self._place:
                raise SystemExit("a page that was put is not found")

    def _got(self, keys: list[CacheEngineKey]) -> list[object]:
        if len(keys) == 1:
            return [self.manager.get(keys[0], self._place)]
        return self.manager.batched_get(keys, self._place)


def start_server() -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [Path(sys.executable).parent / "lmcache_server", "127.0.0.1", str(port), "cpu"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, port
        time.sleep(0.2)
    process.kill()
    raise SystemExit("lmcache_server does not listen")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["cpu", "disk", "remote"])
    parser.add_argument("--dir", type=Path, default=Path.cwd())
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with ending(), tempfile.TemporaryDirectory(prefix="kvt-", dir=arguments.dir) as home:
        measure(arguments, home)


def measure(arguments: argparse.Namespace, home: str) -> None:
    out = answers()
    server = None
    settings: dict[str, object] = {"local_cpu": arguments.mode == "cpu"}
    if arguments.mode == "disk":
        settings |= {"local_disk": f"file://{home}/", "max_local_disk_size": DISK_GIB}
    if arguments.mode == "remote":
        server, port = start_server()
        settings |= {"remote_url": f"lm://127.0.0.1:{port}", "remote_serde": "naive"}
    try:
        store = Store(settings, arguments.pages, arguments.batch, arguments.seed)
        serve(out, version("lmcache"), store.round)
        store.manager.close()
    finally:
        if server is not None:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
