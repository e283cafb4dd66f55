"""Kind 17, TORN: the daemon is killed between any two steps, and what the next one finds is what
was promised, no more and no less.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from fault_model import Book, Workload, check_account
from fault_rig import Pages, disk_usage

import kvtier
from kvtier.errors import AvailabilityError
from kvtier.tiers.crash_points import CRASH_POINTS

CAP = 4 << 20
DEVICES = ("nv0", "nv1")


class Crashes:
    """A daemon on one directory that dies again and again, and its workload."""

    def __init__(self, base: Path, make_daemon, seed: int) -> None:
        self.devices = [base / name for name in DEVICES]
        settings = (
            f"nvme.paths={','.join(map(str, self.devices))}",
            f"nvme.bytes={CAP}",
            "nvme.io_threads=2",
        )
        self.daemon = make_daemon(*settings, "nvme.checkpoint_s=0.05", "nvme.sync_s=0.05")
        self.quiet = make_daemon(*settings, "nvme.checkpoint_s=3600")
        self.books = Book(Pages(5_000, "stable"), 48), Book(Pages(9_000, "bumped"), 16)
        self.work = Workload(seed, *self.books)

    @property
    def is_dead(self) -> bool:
        return self.daemon._process.poll() is not None

    def wait_ready(self, starts: int) -> None:
        """Returns when the daemon has said for the `starts`th time that it is ready, or died."""
        deadline = time.monotonic() + 20
        while self.daemon.log.count("event=daemon.ready") < starts and not self.is_dead:
            assert time.monotonic() < deadline, self.daemon.log
            time.sleep(0.002)

    def work_until_dead(self) -> None:
        """The workload against a daemon that may be dead already; ends when it is."""
        with kvtier.connect(self.daemon.url, deadline=10.0) as kv:
            try:
                self.work.attach(kv)
            except AvailabilityError:
                assert self.is_dead
                return
            self.work.get_all()
            self.work.steps_until(lambda: self.is_dead)

    def verify(self) -> None:
        """A start without a crash finds everything that was promised."""
        self.quiet.start()
        try:
            with kvtier.connect(self.quiet.url, deadline=10.0) as kv:
                self.work.attach(kv)
                check_account(self.quiet, kv, self.books, self.devices)
                assert disk_usage(self.quiet.directory, *self.devices) <= CAP
                for book in self.books:
                    got = kv.namespace(book.pages.layout).get(book.pages.keys(book.numbers))
                    for number, item, page in zip(book.numbers, got, got.pages, strict=True):
                        assert item.reason.name in ("HIT", "MISS", "CORRUPT")
                        book.found(number, item.reason, page)
        finally:
            self.quiet.kill()


# Those of puts by shared memory: test_kind_17_local.
POINTS = [name for name in CRASH_POINTS if not name.startswith("local.")]


@pytest.mark.parametrize("point", POINTS)
def test_killed_at(point, base, make_daemon):
    killed_at(point, 2, base, make_daemon)


@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_it_again_and_again(point, base, make_daemon):
    killed_at(point, 5, base, make_daemon)


def killed_at(point, times, base, make_daemon):
    """The first time that it is reached, then the second time, and so on."""
    crashes = Crashes(base, make_daemon, seed=7)
    daemon = crashes.daemon
    if point.startswith("promote"):
        daemon.start()
        with kvtier.connect(daemon.url, deadline=10.0) as kv:
            crashes.work.attach(kv)
            steps = iter(range(40))
            crashes.work.steps_until(lambda: next(steps, None) is None)
        daemon.kill()
    for nth in range(1, times + 1):
        if point == "segment.created" and nth > 1:
            # Segments stay: the second of a start comes where there is none yet.
            crashes.verify()
            shutil.rmtree(daemon.directory)
            for device in crashes.devices:
                shutil.rmtree(device)
            crashes = Crashes(base, make_daemon, seed=7 + nth)
            daemon = crashes.daemon
        ready = daemon.log.count("event=daemon.ready")
        daemon.start(wait=False, crash_point=f"{point}:{nth}")
        crashes.wait_ready(ready + 1)
        crashes.work_until_dead()
        assert daemon.wait() == -signal.SIGKILL, daemon.log
        assert daemon.log.splitlines()[-1]
    crashes.verify()
    assert "Traceback" not in daemon.log


SEEDS, LONG = 20, 200


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_killed_at_any_time(first, base, make_daemon):
    killed_at_any_time(first, 10, base, make_daemon)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(1000, 1000 + LONG, 50))
def test_killed_at_any_time_at_length(first, base, make_daemon):
    killed_at_any_time(first, 50, base, make_daemon)


def killed_at_any_time(first, count, base, make_daemon):
    crashes = Crashes(base, make_daemon, seed=first)
    for _ in range(first, first + count):
        ready = crashes.daemon.log.count("event=daemon.ready")
        crashes.daemon.start(wait=False)
        delay = crashes.work.rng.choice((0.25, 0.6)) * crashes.work.rng.random()
        killer = threading.Timer(delay, os.kill, (crashes.daemon.pid, signal.SIGKILL))
        killer.start()
        crashes.wait_ready(ready + 1)
        crashes.work_until_dead()
        killer.join()
        assert crashes.daemon.wait() == -signal.SIGKILL, crashes.daemon.log
    crashes.verify()
    assert "Traceback" not in crashes.daemon.log
