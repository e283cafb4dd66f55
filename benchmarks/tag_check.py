"""The tag check of a decode batch, and offload and load of device pages beside memcpy.

    python -m benchmarks.tag_check [--quick] [--rounds 9] [--json FILE]

Check: `TagTracker.verify` of 1, 8 and 32 requests with 64 pages each and the reading of its answer,
as before a decode step; beside it the NoopTracker. What share of a step that is, is the engine's to
measure. Transfers: 64 pages of 2 MiB of k and v, 32 a call, through `PageTransfer` to a daemon of
its own and back, every page verified; the reference is memmove of the same pieces. A stored page
is deleted before it is stored again, outside of the time. Medians over the rounds.

Where there is a CUDA device its rows are measured, too.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import kvtier
from benchmarks.common import attach, daemon, in_turn, wait_populated
from benchmarks.local import came_by, grown
from benchmarks.local_put import went_by
from benchmarks.memory import Pieces
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Missing, Row
from kvtier.client import Connection
from kvtier.client.device import DevicePool, NoopTracker, PageTable, PageTransfer, TagTracker
from kvtier.client.device.tags import Tracker

__all__ = ["rows"]

BATCHES = (1, 8, 32)
PAGES_EACH = 64
POOL_PAGES, CALL_PAGES = 64, 32
ARENA_BYTES = 512 << 20


def layout(layers: int) -> kvtier.Layout:
    """Pages of `layers` x 256 KiB: 64 tokens, 8 heads of 128 numbers of bfloat16."""
    segments = [
        kvtier.Segment(
            name=name,
            role=role,
            dtype="bfloat16",
            layers=layers,
            heads=8,
            dim=128,
            scale_rule=kvtier.ScaleRule.LAYER_HEAD,
        )
        for name, role in (("k", kvtier.Role.KEY), ("v", kvtier.Role.VALUE))
    ]
    return kvtier.Layout.from_segments(
        segments, model_id="bench", revision="1", page_tokens=64, kv_compute="bfloat16"
    )


def verify_us(tracker: Tracker, tables: list[PageTable], calls: int) -> float:
    """Microseconds a check, its answer read."""
    began = time.perf_counter()
    for _ in range(calls):
        assert all(tracker.verify(tables).tolist())
    return (time.perf_counter() - began) / calls * 1e6


def checks(plan: Plan, device: str) -> Iterator[Measured]:
    # Tags do not depend on what a page holds: small pages, as many as the batch has.
    small = kvtier.Layout.from_segments(
        layout(1).segments, model_id="bench", revision="1", page_tokens=1, kv_compute="bfloat16"
    )
    calls = plan.sized(500, 20)
    for batch in BATCHES:
        name = f"device/verify-{device}-{batch}x{PAGES_EACH}"
        if not plan.wants(name):
            continue
        progress(name)
        pool = DevicePool(small, batch * PAGES_EACH, device)
        tables = [PageTable(pool) for _ in range(batch)]
        for table in tables:
            table.append(pool.allocate(PAGES_EACH))
        tags, noop = TagTracker(pool), NoopTracker()
        pairs = in_turn(
            lambda _, a=tags, b=tables: verify_us(a, b, calls),
            lambda _, a=noop, b=tables: verify_us(a, b, calls),
            plan.rounds(9),
        )
        yield Row.of_pairs(
            name,
            f"tag check of {batch} requests x {PAGES_EACH} pages, {device}",
            pairs,
            "us",
            "the no-op tracker",
        )


class Moves:
    """A full pool, keys for its pages, and calls that move it."""

    def __init__(
        self, transfer: PageTransfer, kv: Connection, pieces: Pieces, *, seed: int, kernels: str
    ) -> None:
        self._transfer = transfer
        self._kv = kv
        self._kernels = kernels
        self._stored = 0
        self._before = kv.local
        self._pool = pool = transfer.pool
        self._pieces = pieces
        ids = pool.allocate(pool.pages)
        random.Random(seed).shuffle(ids)
        keys = [hashlib.sha256(b"%d" % number).digest() for number in range(len(ids))]
        self._calls = [
            (keys[at : at + CALL_PAGES], ids[at : at + CALL_PAGES])
            for at in range(0, len(ids), CALL_PAGES)
        ]
        self._order = ids
        pool.rows.copy_(torch.from_numpy(pieces.pages[: pool.pages]))
        self.moved = pool.pages * pool.form.nbytes / 1e9

    def offload(self) -> float:
        """GB/s."""
        for keys, _ in self._calls:
            self._transfer.namespace.delete(keys)
        began = time.perf_counter()
        for keys, ids in self._calls:
            put = self._transfer.offload(keys, ids)
            assert set(put.reasons) == {kvtier.PutCode.STORED}, put
            self._stored += put.stored
        return self.moved / (time.perf_counter() - began)

    def load(self) -> float:
        """GB/s; what came is what was stored."""
        self._pool.rows.zero_()
        began = time.perf_counter()
        for keys, ids in self._calls:
            got = self._transfer.load(keys, ids)
            assert got.prefix == len(keys), got
        took = time.perf_counter() - began
        assert torch.equal(
            self._pool.rows.cpu(), torch.from_numpy(self._pieces.pages[: self._pool.pages])
        )
        return self.moved / took

    def note(self, what: str) -> str:
        """By which way the pages went."""
        now = self._kv.local
        if what == "load":
            return came_by(grown(self._before.counts, now.counts), self._kernels)
        return went_by(grown(self._before.puts, now.puts), self._stored, now.not_writing)

    def memmove(self) -> float:
        """GB/s."""
        return self.moved / self._pieces.memmove(self._order)


@contextmanager
def moves(plan: Plan, device: str) -> Iterator[Moves]:
    page_layout = layout(8)
    pages = plan.sized(POOL_PAGES, CALL_PAGES)
    pieces = Pieces(page_layout.raw_bytes, pages * page_layout.raw_bytes, plan.seed)
    with (
        daemon(f"host.bytes={ARENA_BYTES}") as (url, _, _),
        kvtier.connect(url, deadline=60) as kv,
    ):
        pool = DevicePool(page_layout, pages, device)
        namespace = kv.namespace(page_layout, tenant="bench")
        kernels = attach(kv)
        wait_populated(kv, ARENA_BYTES)
        with PageTransfer(pool, namespace, deadline=60) as transfer:
            yield Moves(transfer, kv, pieces, seed=plan.seed, kernels=kernels)


def transfers(plan: Plan, device: str) -> Iterator[Measured]:
    names = {what: f"device/{what}-{device}-2MiB-{CALL_PAGES}" for what in ("offload", "load")}
    if not any(map(plan.wants, names.values())):
        return
    with moves(plan, device) as made:
        for what, name in names.items():
            progress(name)
            step = made.offload if what == "offload" else made.load
            pairs = in_turn(lambda _, a=step: a(), lambda _: made.memmove(), plan.rounds(9))
            yield Row.of_pairs(
                name,
                f"{what}, pool on {device}, 2 MiB pages, {CALL_PAGES} a call",
                pairs,
                "GB/s",
                "memmove of the same pieces",
                note=made.note(what),
            )


def rows(plan: Plan) -> Iterator[Measured]:
    torch.set_num_threads(1)
    for device in ("cpu", "cuda"):
        if device == "cuda" and not torch.cuda.is_available():
            yield Missing(name="device/cuda", reason="no CUDA device")
            return
        yield from checks(plan, device)
        yield from transfers(plan, device)


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("Device pages", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
