"""A trace against a running daemon: what it finds there, whether every byte is right, how fast.

Each request asks for the pages of its blocks, takes those up to the first that is not there, checks
every byte of all that came, and puts the rest: an engine without a cache of its own. A page's bytes
follow from its key alone (a fixed random pattern, each word mixed with the key), so a page of
another key, a shifted or a torn one differs nearly everywhere. Before a get every byte of what it
is to fill is another one than it has to be, so a byte that was not written is a wrong one. The
namespace is made for the run and deleted after it, however it ended, so it begins cold whatever the
daemon holds.

A daemon that stops answering ends the run; what was found until then is kept. One thread.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.bench.errors import BenchInput
from kvtier.bench.trace import Paths, Trace
from kvtier.client import Connection, Namespace, connect
from kvtier.core.page import GetCode, PutCode, Tier
from kvtier.errors import KvtierError, UnknownNamespace
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment

__all__ = ["LiveOptions", "LiveRun", "page_bytes_checked", "run_live"]

Bytes = npt.NDArray[np.uint8]

#: Of one call.
_WINDOW_BYTES: Final = 32 << 20
_WINDOW_PAGES: Final = 1024
_PAGE_UNIT: Final = 1024
_PAGE_BYTES_MAX: Final = 64 << 20
_MODEL: Final = "kvtier-bench-live"
_TENANT: Final = "kvtier-bench"
#: How long an attachment to shared memory is waited for, and how it says that it is under way.
_ATTACH_S: Final = 60.0
_POLL_S: Final = 0.02
_ATTACHING: Final = frozenset({"attaching"})
_GONE: Final = frozenset({GetCode.UNAVAILABLE, GetCode.TIMEOUT, GetCode.STALE})
_PUT_GONE: Final = frozenset({PutCode.UNAVAILABLE, PutCode.TIMEOUT, PutCode.STALE_GENERATION})


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """`speedup`: the trace's time over ours; 0: a request begins when the one before it is done.
    `requests_max`: of the first ones; None: all."""

    url: str
    page_bytes: int
    speedup: float = 0.0
    requests_max: int | None = None
    plane: str = "grpc"
    deadline_s: float = 5.0


@dataclass(slots=True, kw_only=True)
class LiveRun:
    """What came of it, of each request that was done: leading pages found, of them in nvme, and
    seconds of its gets, of its puts and behind its time. `wrong`: pages that were hits and had
    other bytes. `pages_stored`: of the pages put, those that the daemon took. `counters`: by how
    much the daemon's rose. `ended`: why it ended before its last request, or None. `not_deleted`:
    why the daemon still has the namespace, or None."""

    page_bytes: int
    prefix: list[int] = field(default_factory=list)
    from_nvme: list[int] = field(default_factory=list)
    get_s: list[float] = field(default_factory=list)
    put_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    pages_stored: int = 0
    pages_checked: int = 0
    wrong: int = 0
    first_wrong: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)
    capacities: dict[Tier, int] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    plane: str = ""
    wall_s: float = 0.0
    ended: str | None = None
    not_deleted: str | None = None

    @property
    def requests(self) -> int:
        return len(self.prefix)


def page_bytes_checked(size: int) -> int:
    """A size of page that can be asked for. Raises BenchInput."""
    if not _PAGE_UNIT <= size <= _PAGE_BYTES_MAX or size % _PAGE_UNIT:
        raise BenchInput(
            f"--page-bytes is {size}", remedy="give a multiple of 1 KiB, from 1KiB to 64MiB"
        )
    return size


class _Gone(Exception):
    """The daemon does not answer any more; the message says what it said last."""


def run_live(
    trace: Trace, options: LiveOptions, progress: Callable[[int], None] | None = None
) -> LiveRun:
    """Raises KvtierError when the daemon cannot be reached at all, and nothing later."""
    run = LiveRun(page_bytes=options.page_bytes)
    layout, salt = _layout(trace, options.page_bytes), os.urandom(16)
    with connect(
        options.url, deadline=options.deadline_s, client_name="kvtier bench", plane=options.plane
    ) as connection:
        status = connection.status()
        run.capacities = {tier.tier: tier.capacity_bytes for tier in status.tiers}
        try:
            pages = connection.namespace(layout, tenant=_TENANT, salt=salt)
            _wait_for_plane(connection, pages)
            client = _Engine(trace, options.page_bytes, pages, run)
            begin = time.monotonic()
            try:
                _play(trace, options, client, begin, progress)
                run.counters.update(connection.status().counters)
                run.counters.subtract(status.counters)  # before the pages of this run are deleted
            except (_Gone, KvtierError) as error:
                run.ended = str(error)
            run.plane = _plane(connection)
            run.wall_s = time.monotonic() - begin
        finally:
            run.not_deleted = _delete(connection, layout, salt)
    return run


def _play(
    trace: Trace,
    options: LiveOptions,
    client: _Engine,
    begin: float,
    progress: Callable[[int], None] | None,
) -> None:
    """Raises _Gone and KvtierError."""
    for request, path in enumerate(Paths(trace)):
        if request == options.requests_max:
            break
        due = begin + _due(trace, request, options.speedup)
        _wait_until(due)
        client.serve(request, path)
        client.run.late_s.append(max(0.0, time.monotonic() - due) if options.speedup else 0.0)
        if progress is not None:
            progress(request)


def _delete(connection: Connection, layout: Layout, salt: bytes) -> str | None:
    """Why the daemon still has the namespace, or None. It outlives the daemon's process, so that
    nobody could find it again."""
    try:
        connection.delete_namespace(layout, tenant=_TENANT, salt=salt)
    except UnknownNamespace:
        return None
    except KvtierError as error:
        return str(error)
    return None


def _wait_for_plane(connection: Connection, pages: Namespace) -> None:
    """Until shared memory is used, or is known not to be; its code may have to be compiled."""
    pages.lookup([_key(0)])  # opens the namespace, which begins it
    until = time.monotonic() + _ATTACH_S
    while connection.local.reason in _ATTACHING and time.monotonic() < until:
        time.sleep(_POLL_S)


def _plane(connection: Connection) -> str:
    counts = connection.local.counts
    return "shared memory" if counts.hits + counts.misses else "grpc"


def _due(trace: Trace, request: int, speedup: float) -> float:
    if not speedup:
        return 0.0
    return float(trace.arrival_s[request] - trace.arrival_s[0]) / speedup


def _wait_until(due: float) -> None:
    left = due - time.monotonic()
    if left > 0:
        time.sleep(left)


def _layout(trace: Trace, page_bytes: int) -> Layout:
    segment = Segment(
        name="bytes",
        role=Role.OPAQUE,
        dtype="uint8",
        layers=1,
        heads=page_bytes // _PAGE_UNIT,
        dim=_PAGE_UNIT,
        scale_rule=ScaleRule.NONE,
    )
    return Layout.from_segments(
        [segment],
        model_id=_MODEL,
        revision="1",
        page_tokens=1,
        kv_compute="uint8",
        key_scheme=f"{_MODEL}-{trace.block_tokens}",
    )


class _Engine:
    """One engine without a cache of its own."""

    def __init__(self, trace: Trace, page_bytes: int, pages: Namespace, run: LiveRun) -> None:
        self._pages = pages
        self.run = run
        self._window = max(1, min(_WINDOW_PAGES, _WINDOW_BYTES // page_bytes))
        generator = np.random.Generator(np.random.PCG64(1))
        self._pattern = generator.integers(0, 1 << 63, page_bytes // 8, np.uint64)
        self._other = ~self._pattern  # differs in every byte
        self._buffer: Bytes = np.zeros((self._window, page_bytes), np.uint8)
        self._sessions = trace.session.tolist()

    def serve(self, request: int, path: npt.NDArray[np.int32]) -> None:
        """Raises _Gone."""
        keys = self._pages.keys_from([_key(block) for block in path.tolist()])
        found = below = 0
        get_s = put_s = 0.0
        for at in range(0, len(keys), self._window):
            part = keys[at : at + self._window]
            self._fill(part, self._other)
            began = time.monotonic()
            got = self._pages.get(part, out=self._buffer[: len(part)])
            get_s += time.monotonic() - began
            reasons = got.reasons
            self._count("get", reasons, _GONE)
            self._check(part, reasons)
            below += sum(item.tier is Tier.NVME for item in got[: got.prefix])
            found += got.prefix
            if got.prefix < len(part):
                break
        for at in range(found, len(keys), self._window):
            part = keys[at : at + self._window]
            self._fill(part, self._pattern)
            began = time.monotonic()
            put = self._pages.put(
                part, self._buffer[: len(part)], session=str(self._sessions[request])
            )
            put_s += time.monotonic() - began
            self._count("put", put.reasons, _PUT_GONE)
            self.run.pages_stored += Counter(put.reasons)[PutCode.STORED]
        self.run.prefix.append(found)
        self.run.from_nvme.append(below)
        self.run.get_s.append(get_s)
        self.run.put_s.append(put_s)

    def _fill(self, keys: Sequence[bytes], pattern: npt.NDArray[np.uint64]) -> None:
        for number, key in enumerate(keys):
            np.bitwise_xor(pattern, _word(key), out=self._buffer[number].view(np.uint64))

    def _count(
        self,
        call: str,
        reasons: Sequence[GetCode] | Sequence[PutCode],
        gone: frozenset[GetCode] | frozenset[PutCode],
    ) -> None:
        for code, count in Counter(reasons).items():
            self.run.outcomes[f"{call} {code.name}"] += count
            if code in gone:
                raise _Gone(f"the daemon stopped serving: {call} answered {code.name}")

    def _check(self, keys: Sequence[bytes], reasons: Sequence[GetCode]) -> None:
        """Of all hits, those behind the first page that is not there too."""
        run = self.run
        for number, (key, reason) in enumerate(zip(keys, reasons, strict=True)):
            if reason is not GetCode.HIT:
                continue
            run.pages_checked += 1
            wrong = self._buffer[number].view(np.uint64) ^ self._pattern
            if bool((wrong != _word(key)).any()):
                run.wrong += 1
                run.first_wrong = run.first_wrong or key.hex()


def _key(block: int) -> bytes:
    return hashlib.sha256(b"kvtier-bench-live" + block.to_bytes(8, "little")).digest()


def _word(key: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(key[:8], "little"))
