"""The host arena: sealed, sized, populated slab by slab, and closed without loss of anybody's
memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.core.page import Tier
from kvtier.errors import InvalidConfigValue, TierIOError
from kvtier.testing.cells import check_page, make_page
from kvtier.testing.leaks import no_leaks
from kvtier.testing.tier_suite import TierSuite
from kvtier.tiers.host import SLAB_BYTES, HostArena, slab_layout
from kvtier.tiers.memfd import ARENA_SEALS, create_sealed, free_huge_bytes

MIB = 1 << 20
GIB = 1 << 30
REPO = Path(__file__).resolve().parents[2]


class TestHostTier(TierSuite):
    def make_tier(self, capacity_bytes, directory):
        return HostArena(capacity_bytes)


@pytest.fixture
def arena():
    with HostArena(4 * MIB, slab_bytes=MIB, huge_pages=False) as opened:
        yield opened


@pytest.mark.parametrize("power", range(20, 27))
def test_a_slab_holds_records_of_powers_of_two_without_waste(power):
    record = (1 << power) + 4096
    count = SLAB_BYTES // record
    assert count == 64 * MIB >> power
    assert SLAB_BYTES - count * record <= 252 * 1024


@pytest.mark.parametrize(
    ("capacity", "slab", "expected"),
    [
        (3 * SLAB_BYTES, SLAB_BYTES, (SLAB_BYTES, 3)),
        (4 * SLAB_BYTES - 1, SLAB_BYTES, ((4 * SLAB_BYTES - 1) // 3 // 4096 * 4096, 3)),
        (64 * MIB, SLAB_BYTES, (64 * MIB, 1)),
        (128 * MIB, SLAB_BYTES, (128 * MIB, 1)),
        (4096 * MIB, SLAB_BYTES, (4096 * MIB // 63 // 4096 * 4096, 63)),
        (SLAB_BYTES - 1, SLAB_BYTES, (SLAB_BYTES - 4096, 1)),
        (10_000, SLAB_BYTES, (8192, 1)),
        (4096, SLAB_BYTES, (4096, 1)),
        (10 * MIB + 5, 4 * MIB, (5 * MIB, 2)),
    ],
)
def test_slabs_fill_the_capacity(capacity, slab, expected):
    layout = slab_layout(capacity, slab)
    assert (layout.slab_bytes, layout.count) == expected


@pytest.mark.parametrize("mib", [1, 63, 65, 100, 127, 128, 129, 192, 193, 1000, 4096, 100_000])
def test_next_to_nothing_of_the_capacity_is_left_over(mib):
    layout = slab_layout(mib * MIB)
    left = mib * MIB - layout.slab_bytes * layout.count
    assert 0 <= left < 4096 * layout.count
    assert layout.slab_bytes % 4096 == 0
    assert layout.slab_bytes < 2 * SLAB_BYTES
    assert layout.slab_bytes >= min(SLAB_BYTES, mib * MIB)


@pytest.mark.parametrize("capacity", [-1, 0, 4095])
def test_an_arena_of_nothing_is_refused(capacity):
    with pytest.raises(InvalidConfigValue) as caught:
        HostArena(capacity)
    assert "host.bytes" in caught.value.remedy


def test_what_it_says_of_itself(arena):
    assert (arena.tier, arena.capacity_bytes) == (Tier.HOST, 4 * MIB)
    assert (arena.slab_bytes, arena.slab_count) == (MIB, 4)
    assert (arena.huge_pages, arena.file_bytes) == (False, 4 * MIB)
    assert (arena.ready_slabs, arena.degraded) == (0, "")


def test_nobody_can_change_the_size(arena):
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & ARENA_SEALS == ARENA_SEALS
    for size in (0, 4 * MIB - 1, 4 * MIB + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(arena.fd).st_size == 4 * MIB


def test_the_memfd_is_private(arena):
    assert stat.S_IMODE(os.fstat(arena.fd).st_mode) == 0o600
    assert not os.get_inheritable(arena.fd)
    assert os.readlink(f"/proc/self/fd/{arena.fd}").startswith("/memfd:kvtier-arena")


def test_the_map_is_left_out_of_forks_and_core_files(arena):
    start = f"{arena.bytes.ctypes.data:08x}-"
    maps = Path("/proc/self/smaps").read_text()
    flags = re.search(rf"^{start}.*?^VmFlags: (.*?)$", maps, re.DOTALL | re.MULTILINE)[1].split()
    assert {"dc", "dd", "sh", "wr"} <= set(flags)


def test_a_client_maps_the_same_memory(arena):
    page = make_page(8192, namespace="n", key=b"k", version=1)
    with mmap.mmap(arena.fd, arena.file_bytes) as client:
        arena.write(2, [page])
        assert client[8192:16384] == page
        client[0:4] = b"from"
    assert bytes(arena.view(0, 0, 4)) == b"from"


def test_views_are_the_memory_itself(arena):
    view = arena.view(3, 100, 200)
    assert (view.readonly, view.nbytes, view.format) == (False, 200, "B")
    view[:] = b"v" * 200
    assert arena.bytes[3 * 4096 + 100 : 3 * 4096 + 300].tobytes() == b"v" * 200
    assert arena.bytes.dtype == np.uint8
    assert arena.bytes.shape == (4 * MIB,)


@pytest.mark.parametrize(
    ("slot", "offset", "length"),
    [
        (-1, 0, 1),
        (0, -1, 1),
        (0, 0, -1),
        (1024, 0, 1),
        (1023, 0, 4097),
        (0, 4 * MIB, 1),
        (1 << 52, 0, 1),
    ],
)
def test_views_outside_are_refused(arena, slot, offset, length):
    with pytest.raises(TierIOError, match=f"host tier: read failed at slot {slot}"):
        arena.view(slot, offset, length)


def test_beyond_4_gib():
    """Sparse: only the pages that are written take memory."""
    with HostArena(5 * GIB, slab_bytes=GIB, huge_pages=False) as arena:
        places = [
            0,
            1,
            (1 << 31) // 4096,
            (1 << 32) // 4096 - 1,
            (1 << 32) // 4096,
            5 * GIB // 4096 - 1,
        ]
        for number, slot in enumerate(places):
            arena.write(slot, [make_page(4096, namespace="n", key=b"k", version=1, page_no=number)])
        for number, slot in enumerate(places):
            named = {"namespace": "n", "key": b"k", "version": 1, "page_no": number}
            assert check_page(arena.view(slot, 0, 4096), **named) == []
            assert check_page(arena.view(0, slot * 4096, 4096), **named) == []
            back = bytearray(4096)
            arena.read(np.uint32(slot), 0, back)
            assert check_page(back, **named) == []
        assert os.fstat(arena.fd).st_blocks * 512 <= MIB


def test_too_large_for_the_address_space_leaves_nothing():
    with no_leaks(), pytest.raises(TierIOError, match=r"host tier: open failed: .*ENOMEM"):
        HostArena(1 << 50, huge_pages=False)


@pytest.mark.parametrize("failing", ["fchmod", "ftruncate", "fstat"])
def test_a_failing_open_leaves_nothing(monkeypatch, failing):
    def fail(*_):
        raise OSError(5, "Input/output error")

    with no_leaks(), monkeypatch.context() as patched:
        patched.setattr(f"kvtier.tiers.memfd.os.{failing}", fail)
        with pytest.raises(TierIOError, match=r"open failed: Input/output error \(EIO\)"):
            create_sealed("x", 4096, tier=Tier.HOST)


def test_a_seal_that_did_not_stick_is_noticed(monkeypatch):
    real = fcntl.fcntl

    def forgetful(fd, command, argument=0):
        if command == fcntl.F_ADD_SEALS:
            return 0
        return real(fd, command, argument)

    monkeypatch.setattr("kvtier.tiers.memfd.fcntl.fcntl", forgetful)
    with no_leaks(), pytest.raises(TierIOError, match="asked for seals 0x7 and got 0x0"):
        create_sealed("x", 4096, tier=Tier.HOST)


def test_huge_pages_that_are_gone_when_asked_for(monkeypatch):
    """The count says there are enough, the kernel has none: normal pages, visibly."""
    if free_huge_bytes() > 0:
        pytest.skip("this machine has huge pages")
    monkeypatch.setattr("kvtier.tiers.host.free_huge_bytes", lambda: GIB)
    with HostArena(4 * MIB, slab_bytes=MIB) as arena:
        assert arena.huge_pages is False
        assert arena.file_bytes == 4 * MIB
        arena.write(0, [b"x"])


@pytest.mark.skipif(free_huge_bytes() < 8 * MIB, reason="no free 2 MiB pages are configured")
def test_huge_pages():
    with HostArena(3 * SLAB_BYTES // 64, slab_bytes=SLAB_BYTES // 64) as arena:
        assert arena.huge_pages is True
        assert arena.file_bytes % (2 * MIB) == 0
        arena.start_populating(lambda _: None)
        assert arena.wait_populated(10.0)
        arena.write(arena.capacity_bytes // 4096 - 1, [b"x" * 4096])


@pytest.mark.parametrize(
    ("free", "reserved", "expected"),
    [("10\n", "4\n", 12 * MIB), ("0", "0", 0), ("1", "2", 0), ("x", "0", 0)],
)
def test_free_huge_bytes(tmp_path, free, reserved, expected):
    (tmp_path / "free_hugepages").write_text(free)
    (tmp_path / "resv_hugepages").write_text(reserved)
    assert free_huge_bytes(tmp_path) == expected
    assert free_huge_bytes(tmp_path / "absent") == 0


def test_close_with_a_view_out():
    """The view stays good, nothing else does, and the memory goes with the view."""
    arena = HostArena(MIB, huge_pages=False)
    inode = str(os.fstat(arena.fd).st_ino)
    view = arena.view(0, 0, 4)
    view[:] = b"kept"
    arena.close()
    arena.close()
    assert bytes(view) == b"kept"
    assert f" {inode} " in Path("/proc/self/maps").read_text()
    for use in (lambda: arena.view(0, 0, 1), lambda: arena.bytes, lambda: arena.fd):
        with pytest.raises(TierIOError, match="the arena is closed"):
            use()
    del view
    assert f" {inode} " not in Path("/proc/self/maps").read_text()


def test_close_under_running_copies():
    """Copies in other threads end well or are refused; the process survives."""
    arena = HostArena(16 * MIB, huge_pages=False)
    started = threading.Barrier(4)
    endings = []

    def copy():
        buffer = bytearray(4 * MIB)
        started.wait()
        try:
            while True:
                arena.read(0, 0, buffer)
        except TierIOError as error:
            endings.append(str(error))

    threads = [threading.Thread(target=copy) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    time.sleep(0.02)
    arena.close()
    for thread in threads:
        thread.join(10)
    assert endings == ["host tier: read failed at slot 0: the arena is closed (EBADF)"] * 3


def run_script(script, *wrapper):
    """Run Python in a process of its own; a crash shows as a negative return code."""
    return subprocess.run(
        [*wrapper, sys.executable, "-W", "error", "-c", script],
        capture_output=True, text=True, timeout=50, check=False, cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip


FORK_SCRIPT = """
import os, sys
from kvtier.errors import TierIOError
from kvtier.tiers.host import HostArena
arena = HostArena(64 << 20, huge_pages=False)
arena.write(0, [b"parent"])
pid = os.fork()
if pid == 0:
    # New memory of the child lies where the arena was; ending must not unmap it.
    blocks = [bytearray(8 << 20) for _ in range(16)]
    try:
        arena.view(0, 0, 1)
    except TierIOError as error:
        print(error, flush=True)
    arena.close()
    del arena
    for block in blocks:
        block[::4096] = b"x" * (len(block) // 4096)
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert bytes(arena.view(0, 0, 6)) == b"parent"
arena.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_is_refused_and_ends_well():
    done = run_script(FORK_SCRIPT)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout == (
        "host tier: read failed at slot 0: the arena belongs to the parent process (EBADF)\n"
    )


SMALL_SHM_SCRIPT = """
import os
from kvtier.tiers.host import HostArena
size = 256 << 20
with open("/dev/shm/probe", "wb") as probe:
    try:
        os.posix_fallocate(probe.fileno(), 0, size)
        print("no limit")
    except OSError as error:
        print(error.strerror)
with HostArena(size, huge_pages=False) as arena:
    ready = []
    arena.start_populating(ready.append)
    assert arena.wait_populated(40.0), arena.degraded
    arena.bytes[:] = 7
    print(len(ready), arena.slab_count, arena.capacity_bytes, int(arena.bytes[-1]))
"""


def user_namespaces():
    return subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False)


def test_dev_shm_of_64_mib_is_no_limit():
    """The default of a container; a shared-memory file would die with SIGBUS."""
    if user_namespaces().returncode != 0:
        pytest.skip(f"no user namespaces: {user_namespaces().stderr.decode().strip()}")
    inside = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    done = run_script(SMALL_SHM_SCRIPT, "unshare", "-Urm", "sh", "-c", inside, "sh")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "No space left on device",
        f"3 3 {256 * MIB // 3 // 4096 * 4096 * 3} 7",
    ]


def test_where_executable_memfds_are_forbidden():
    """vm.memfd_noexec = 2: the kernel adds a seal of its own."""
    inside = 'echo 2 > /proc/sys/vm/memfd_noexec && exec "$@"'
    wrapper = ("unshare", "-Urmpf", "--mount-proc", "sh", "-c", inside, "sh")
    if subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no user namespaces, or a kernel without vm.memfd_noexec")
    script = "from kvtier.tiers.host import HostArena; a = HostArena(4096); a.write(0, [b'x'])"
    assert run_script(script + "; print(bytes(a.view(0, 0, 1)))", *wrapper).stdout == "b'x'\n"
