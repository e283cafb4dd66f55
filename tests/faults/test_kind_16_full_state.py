"""Kind 16, DISKFULL, of the daemon directory: status says so as long as it lasts."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from fault_rig import GetCode, Pages, need_tmpfs, until, warnings_of

from kvtier.errors import DirectoryError

HIT = GetCode.HIT
PAGES = Pages(5_000)


@pytest.fixture
def on_tmpfs(base) -> tuple[str, ...]:
    """The prefix of a command under which the daemon directory is a tmpfs of 4 MiB."""
    need_tmpfs(base)
    state = base / "state"
    state.mkdir(mode=0o700)
    script = f'mount -t tmpfs -o size=4m,mode=700 tmpfs {state} && exec "$@"'
    return ("unshare", "-Urm", "sh", "-c", script, "sh")


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def test_a_full_daemon_directory_is_in_the_status(make_daemon, connect, on_tmpfs):
    daemon = make_daemon("nvme.bytes=32MiB", "nvme.checkpoint_s=0.2", prefix=on_tmpfs).start()
    kv = connect(daemon)
    ns = kv.namespace(PAGES.layout)
    PAGES.put(ns, range(40))
    ballast = Path(f"/proc/{daemon.pid}/root{daemon.directory}") / "ballast"
    fill(ballast)
    numbers = iter(range(100, 100_000))

    def is_warned() -> bool:
        n = next(numbers)
        put = ns.put(PAGES.keys([n]), [PAGES.page(n)], durable="nvme", chain=False)
        assert put.stored == 1
        with contextlib.suppress(DirectoryError):
            assert ns.delete(PAGES.keys([n])).deleted == 1
        return "No space left on device" in warnings_of(kv)

    assert until(is_warned, within_s=20)
    assert f"remedy: Make room on the file system of {daemon.directory}" in warnings_of(kv)
    time.sleep(1)
    assert "No space left on device" in warnings_of(kv), "as long as it lasts"
    failures = daemon.log.count("nvme.journal_failed")
    assert failures <= 3, "the log hears of changes"
    ballast.unlink()
    assert until(lambda: not warnings_of(kv), within_s=20), warnings_of(kv)
    assert "nvme.journal_works" in daemon.log
    PAGES.put(ns, [99])
    assert PAGES.get(ns, [*range(40), 99]) == [HIT] * 41
