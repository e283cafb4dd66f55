"""Kind 42, CLOCK: no lease, session, budget, timeout or order depends on the time of day.

By the text of the code (nothing but the log asks for it), and by behaviour: a wall clock that is
set back and forth changes nothing.
"""

from __future__ import annotations

import ast
import sys
import time
from pathlib import Path

import pytest

from kvtier.core.budget import WriteBudget
from kvtier.core.page import GetCode, LeaseCode, Tier
from kvtier.packing.record import HEADER_BYTES, decode_header
from tests.core import support
from tests.faults.kinds_rig import (
    get_checked,
    keys_of,
    on_loop,
    pages_of,
    rows,
    running,
    until,
)

#: Calls that tell or turn into the time of day; names of the last part are enough for `datetime`.
WALL = {
    "time.time",
    "time.time_ns",
    "time.ctime",
    "time.gmtime",
    "time.localtime",
    "time.mktime",
    "time.strftime",
    "time.asctime",
    "time.clock_gettime",
    "time.clock_gettime_ns",
}
WALL_METHODS = {"now", "utcnow", "today", "fromtimestamp"}
#: A line of the log says when it was written.
LOGS = {"kvtier/daemon/logs.py"}
DAY_S = 86_400.0


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def wall_clocks(tree: ast.AST) -> list[str]:
    """Uses of the time of day: calls, names that are passed on, and imports of them."""
    found = []
    for node in ast.walk(tree):
        name = dotted(node)
        if name in WALL:
            found.append(name)
        elif isinstance(node, ast.Attribute) and node.attr in WALL_METHODS:
            if dotted(node.value).rpartition(".")[2] in {"datetime", "date"}:
                found.append(name)
        elif isinstance(node, ast.ImportFrom) and node.module in {"time", "datetime"}:
            whole = {f"time.{alias.name}" for alias in node.names} & WALL
            found += sorted(whole) if node.module == "time" else ["datetime"]
        elif isinstance(node, ast.Attribute) and node.attr in {"st_mtime", "st_ctime", "st_atime"}:
            found.append(node.attr)
    return found


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("import time; time.time()", 1),
        ("clock = time.time", 1),
        ("from time import time, monotonic", 1),
        ("from datetime import datetime", 1),
        ("datetime.datetime.now(tz)", 1),
        ("date.today()", 1),
        ("path.stat().st_mtime", 1),
        ("time.monotonic(); time.perf_counter(); time.sleep(1); now()", 0),
        ("self.clock.now", 0),
    ],
)
def test_the_check_sees_a_wall_clock(code, seen):
    assert len(wall_clocks(ast.parse(code))) == seen


def test_nothing_but_the_log_asks_for_the_time_of_day(repo: Path):
    found = {}
    for path in sorted((repo / "kvtier").rglob("*.py")):
        name = path.relative_to(repo).as_posix()
        if name not in LOGS and not name.startswith("kvtier/v1/"):
            uses = wall_clocks(ast.parse(path.read_text()))
            if uses:
                found[name] = uses
    assert found == {}


class _WallClock:
    """The time of day, set to anything, for everybody but gRPC, which hands it on to its own core,
    where it is not set.
    """

    def __init__(self, monkeypatch):
        self.offset_s = 0.0
        self.asked = 0
        true = time.time

        def now():
            if sys._getframe(1).f_globals["__name__"].startswith("grpc"):
                return true()
            self.asked += 1
            return true() + self.offset_s

        monkeypatch.setattr(time, "time", now)


@pytest.fixture
def wall(monkeypatch):
    return _WallClock(monkeypatch)


@on_loop
async def test_leases_and_sessions_do_not_see_the_clock_being_set(base, wall):
    keys = keys_of(range(8))
    async with running(base, "limits.session_ttl_s=1.0") as daemon:
        ns = await daemon.namespace()
        await ns.put(keys, pages_of(keys), durable="nvme")
        async with ns.lease(keys, ttl=30.0) as held:
            for days in (10, -10_000, 20_000):
                wall.offset_s = days * DAY_S
                assert daemon.store.pins.expire(time.monotonic()) == 0
                daemon.node.sessions.reap()
                assert (held.prefix, daemon.store.pins.count()) == (8, 1)
                await held.renew(30.0)
        async with ns.lease(keys, ttl=0.05) as held:
            wall.offset_s = -10_000 * DAY_S
            await until(lambda: daemon.store.pins.count() == 0)
            assert held.prefix == 0, "in its own time"
        await until(lambda: len(daemon.node.sessions) == 0)
        assert (await get_checked(ns, keys)).prefix == 8
        await daemon.settled()


@on_loop
async def test_timeouts_and_retries_do_not_see_the_clock_being_set(base, wall):
    """Checkpoints, syncs and drains are due as ever; nothing waits for a day that has passed."""
    keys = keys_of(range(8))
    every = ("nvme.checkpoint_s=0.05", "nvme.sync_s=0.05", "nvme.write_bytes_per_day=1GiB")
    async with running(base, *every) as daemon:
        ns = await daemon.namespace()
        wall.offset_s = -365 * DAY_S
        before = daemon.metric("kvtier_nvme_checkpoints_total")
        for n, key in enumerate(keys):
            wall.offset_s *= -1.5
            assert (await ns.put([key], pages_of([key]), durable="nvme")).durable == 1, n
        await until(lambda: daemon.metric("kvtier_nvme_checkpoints_total") > before)
        assert daemon.metric("kvtier_uptime_seconds") < 60
        daemon.stops = True
    wall.offset_s = -5_000 * DAY_S  # the next boot lies before this one
    async with running(base, *every) as daemon:
        got = await get_checked(await daemon.namespace(), keys)
        assert got.prefix == 8, "what is newer is known by its number"
        await daemon.settled()


@on_loop
async def test_records_hold_no_time_of_day(base, wall):
    keys = keys_of(range(2))
    async with running(base) as daemon:
        ns = await daemon.namespace()
        for offset, key in zip((0.0, 9_000 * DAY_S), keys, strict=True):
            wall.offset_s = offset
            await ns.put([key], pages_of([key]), durable="nvme", ttl=60)
        for slot in daemon.slots(ns, keys):
            header = bytearray(HEADER_BYTES)
            daemon.disk.read(slot, 0, header)
            assert decode_header(memoryview(header)).created_ms == 0


def test_order_and_budget_take_their_time_from_the_caller(wall):
    """Core reads no clock: what is passed in decides, whatever the time of day."""
    store = support.make_store(slots=4)
    for n in range(4):
        wall.offset_s = -n * DAY_S  # younger pages, older times of day
        support.put(store, n)
    wall.offset_s = DAY_S
    support.put(store, 9)
    assert support.present(store, [0, 1, 2, 3, 9]) == [1, 2, 3, 9], "least recently used"
    lease, codes = store.pins.pin(7, support.NS, 0, rows([support.key(9)]), deadline=100.0)
    assert codes.tolist() == [GetCode.HIT]
    wall.offset_s = 10_000 * DAY_S
    assert store.pins.expire(99.9) == 0
    assert store.pins.expire(100.0) == 1
    assert store.pins.unpin(7, [lease], now=100.0) == [LeaseCode.EXPIRED]
    budget = WriteBudget(24 << 30, 5.0)
    assert budget.take(1 << 30, 5.0)
    wall.offset_s = -10_000 * DAY_S
    assert not budget.take(1 << 20, 5.0), "no time has passed"
    assert budget.take(1 << 20, 5.0 + 3600.0)
    assert store.status()[Tier.HOST].pinned == 0
    assert wall.asked == 0
