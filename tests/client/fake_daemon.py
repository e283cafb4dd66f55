"""A small honest daemon for client tests: a dict of pages behind the real wire, with faults to
order.

It keeps the rules of the protocol (handles, generations, sums, limits) and none of a daemon's other
business. Runs in a thread of its own; attributes may be set from the test's thread between calls.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter

import grpc.aio

from kvtier import errors
from kvtier.transfer import rpc
from kvtier.v1 import transfer_pb2
from tests.client.fake_service import REMEDY, Bound, FakeService, Family, Stored
from tests.client.fake_tiers import FakeTiers


class FakeDaemon:
    """`faults` are read by the service on each call."""

    def __init__(self, path, **limits) -> None:
        self.url = f"unix://{path}"
        self.rng = random.Random(1)
        self.limits = {
            "keys_per_call_max": 1024,
            "pages_per_put_max": 1024,
            "bytes_per_call_max": 1 << 30,
            "message_bytes_max": 16 << 20,
            "page_bytes_max": 1 << 30,
            "lease_ms_default": 10_000,
            "lease_ms_max": 60_000,
            **limits,
        }
        self.chunk_bytes = 64 << 10
        self.families: dict[bytes, Family] = {}
        self.pages: dict[tuple[int, int, bytes], Stored] = {}
        self.calls: Counter[str] = Counter()
        self.leases: dict[int, int] = {}
        self.puts: list[transfer_pb2.PutOpen] = []
        self.flip_gets = 0  # so many pages leave with a wrong byte
        self.stall: set[str] = set()  # methods that never answer
        self.stall_get_after = -1  # a get stalls after so many pages
        self.put_codes: dict[bytes, int] = {}
        self.tiers = FakeTiers()
        self.raise_in: dict[str, errors.KvtierError] = {}
        self._last = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.boot()

    def boot(self) -> None:
        self.boot_id = self.rng.getrandbits(63)
        self.sessions: set[int] = set()
        self.handles: dict[int, Bound] = {}

    # The process.

    def start(self) -> None:
        started = threading.Event()

        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
            service = FakeService(self)
            for name in (rpc.PAGES, rpc.ADMIN):
                server.add_generic_rpc_handlers((rpc.generic_handler(name, service),))
            server.add_insecure_port(self.url.replace("unix://", "unix:"))
            await server.start()
            started.set()
            await self._stop.wait()
            await server.stop(None)

        def run() -> None:
            with asyncio.Runner() as runner:
                loop = runner.get_loop()
                # grpc wakes every loop of the process for one event; the others find it taken.
                loop.set_exception_handler(lambda *_: None)
                runner.run(main())

        self._thread = threading.Thread(target=run, name="fake-daemon")
        self._thread.start()
        assert started.wait(5)

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)
            assert not self._thread.is_alive()
            self._loop = None

    def restart(self, *, keep_pages: bool = True) -> None:
        """A new boot: sessions and handles are gone, namespaces stay."""
        self.stop()
        self.boot()
        if not keep_pages:
            self.pages.clear()
        self.start()

    # What its service does.

    def next(self) -> int:
        self._last += 1
        return self._last

    def family(self, fingerprint: bytes) -> Family:
        if fingerprint not in self.families:
            raise errors.UnknownNamespace("unknown namespace", remedy=REMEDY)
        return self.families[fingerprint]

    def bump(self, fingerprint: bytes, revision: str = "") -> int:
        family = self.family(fingerprint)
        family.generation += 1
        family.number = self.next()
        family.weights_revision = revision or family.weights_revision
        return family.generation
