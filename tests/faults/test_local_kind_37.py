"""Kind 37, PINNEDMEM, on the local plane: little address space, few descriptors, no locked memory
and no threads. A client goes on over gRPC and says why; a daemon says what it lacks, and ends.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier
from kvtier.cli import EXIT_FAILED
from kvtier.client import local_attachment
from kvtier.testing.daemon_process import DaemonNotReady, DaemonProcess
from kvtier.tiers.host import slab_layout
from tests.faults.local_roles import PAGES
from tests.faults.sparse_serve import serving_slabs

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
ARENA = slab_layout(5 * GIB)
ARENA_BYTES = ARENA.slab_bytes * ARENA.count

ARENA_REASON = f"the arena of {ARENA_BYTES} bytes cannot be mapped: "
DIRECTORY_REASON = "the directory of 268570624 bytes cannot be mapped: "
MEMORY, FILES = "Cannot allocate memory", "Too many open files"
TAKEN = "this process could take {} of the descriptors that the daemon passed: it has too many"
NO_THREAD = "there is no thread to attach in: can't start new thread"

#: (limit, when, room) -> (why it does not read shared memory, why it does not write to it), or how
#: that begins. To read it maps directory and arena, and needs a descriptor for its socket, one for
#: each map, and the two that are passed, for a moment; to write as much for the arena alone.
CASES = {
    ("as", "first", 100 * GIB): ("", ""),
    ("as", "first", 6 * GIB): ("", ARENA_REASON + MEMORY),
    ("as", "first-back", 1 * GIB): (ARENA_REASON + MEMORY,) * 2,
    ("as", "first", 200 << 20): (DIRECTORY_REASON + MEMORY,) * 2,
    ("as", "first", 1 << 20): (NO_THREAD,) * 2,
    ("as", "later", 200 << 20): ("", ARENA_REASON + MEMORY),
    ("nofile", "first", 0): ("no socket: " + FILES,) * 2,
    ("nofile", "first", 1): (TAKEN.format(0),) * 2,
    ("nofile", "first", 2): (TAKEN.format(1),) * 2,
    ("nofile", "first", 3): (DIRECTORY_REASON + FILES,) * 2,
    ("nofile", "first", 4): (ARENA_REASON + FILES,) * 2,
    ("nofile", "first", 5): ("", ARENA_REASON + FILES),
    ("nofile", "first", 6): ("", ""),
    ("nofile", "later-back", 0): ("", "no socket: " + FILES),
    ("nofile", "later", 2): ("", ARENA_REASON + FILES),
}


@pytest.fixture(scope="module")
def far() -> Iterator[DaemonProcess]:
    """A daemon with an arena of 5 GiB, which has memory for two slabs."""
    base = Path(tempfile.mkdtemp(prefix="kvt-"))
    with DaemonProcess(base, "host.bytes=5GiB", prefix=serving_slabs(0, 1)) as daemon:
        yield daemon
    shutil.rmtree(base)


@pytest.fixture(scope="module")
def clients(far: DaemonProcess) -> dict[tuple[str, str, int], dict]:
    """What came of each case, in one process that may lock no memory."""
    words = [str(word) for case in CASES for word in case]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.limited_client", far.url, "0", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(CASES, said, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_kind_37_pinnedmem_clients_with_little_go_on(clients, case):
    """Nothing is lost, nothing is left over, and the reason is there to be read."""
    found, (not_reading, not_writing) = clients[case], CASES[case]
    assert (found["put"], found["got"]) == (["STORED"] * 8, ["HIT"] * 8)
    for name, why in (("reason", not_reading), ("not_writing", not_writing)):
        assert found[name].startswith(why), found[name]
        assert bool(found[name]) == bool(why), found[name]
    assert found["attached"] == (not not_reading)
    assert found["hits"] == (0 if not_reading else 8)
    assert found["stored"] == (0 if not_writing else 8)
    assert found["back"]
    assert (found["fds"], found["maps"]) == (0, 0)


def test_kind_37_pinnedmem_a_client_without_the_thread_to_attach_in(far, monkeypatch):
    """Calls do not fail for it, and it is tried again."""

    class NoThread(local_attachment.threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with kvtier.connect(far.url, deadline=10) as kv:
        kv.status()
        with monkeypatch.context() as patch:
            patch.setattr(local_attachment.threading, "Thread", NoThread)
            ns = kv.namespace(PAGES.layout)
            PAGES.put(ns, range(4), durable=False)
        assert PAGES.get(ns, range(4)) == [kvtier.GetCode.HIT] * 4
        assert kv.local.reason == kv.local.not_writing == NO_THREAD


def ended(base: Path, limit_bytes: int, *settings: str) -> DaemonProcess:
    """A daemon that did not start within so much address space."""
    limited = ("sh", "-c", f'ulimit -v {limit_bytes >> 10} && exec "$@"', "sh")
    daemon = DaemonProcess(base, *settings, prefix=limited)
    try:
        with pytest.raises(DaemonNotReady):
            daemon.start()
        assert daemon.wait() == EXIT_FAILED
    finally:
        daemon.close()
    return daemon


@pytest.mark.parametrize(
    ("limit_bytes", "host_bytes"),
    [
        pytest.param(2 * GIB, "3GiB", id="for the arena"),
        pytest.param(1200 << 20, "1GiB", id="for its index"),
        pytest.param(1600 << 20, "1GiB", id="for threads"),
        pytest.param(300 << 20, "64MiB", id="for threads of a small one"),
    ],
)
def test_kind_37_pinnedmem_a_daemon_with_too_little_address_space(base, limit_bytes, host_bytes):
    """It names limit and setting, at once."""
    daemon = ended(base, limit_bytes, f"host.bytes={host_bytes}")
    assert "kind=NotEnoughMemory" in daemon.log
    said = daemon.log.splitlines()[-2:]
    assert said[0].startswith("error: the host tier needs ")
    assert "(host.bytes)" in said[0]
    assert f"RLIMIT_AS = {limit_bytes / (1 << 20):,.2f} MiB" in said[0]
    assert said[1].startswith("remedy: lower host.bytes")
    assert "Traceback" not in daemon.log


def test_kind_37_pinnedmem_a_daemon_with_just_enough(base):
    limited = ("sh", "-c", f'ulimit -v {1100 << 10} && exec "$@"', "sh")
    with DaemonProcess(base, "host.bytes=256MiB", prefix=limited) as daemon:
        with kvtier.connect(daemon.url, deadline=10) as kv:
            ns = kv.namespace(PAGES.layout)
            PAGES.put(ns, range(100), durable=False)
            assert PAGES.get(ns, range(100)) == [kvtier.GetCode.HIT] * 100
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log
