"""How much memory may be taken, told from fake and real files."""

from __future__ import annotations

import logging

import pytest

from kvtier.errors import NotEnoughMemory
from kvtier.testing.sim_clock import SimClock
from kvtier.tiers.memory import (
    Headroom,
    MemoryPolicy,
    check_memory,
    mib,
    read_headroom,
)

MIB = 1 << 20
GIB = 1 << 30
MEMINFO = "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n"  # 16 GiB
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def reader(files):
    files = {"/proc/meminfo": MEMINFO, **files}

    def read(path):
        if path not in files:
            raise FileNotFoundError(path)
        return str(files[path])

    return read


def test_without_cgroups_memavailable_counts():
    found = read_headroom(reader({}))
    assert found == Headroom(free_bytes=16 * GIB, limit="MemAvailable in /proc/meminfo")


def test_without_any_file_nothing_is_free():
    def read(path):
        raise PermissionError(path)

    assert read_headroom(read).free_bytes == 0


def v2(path, **more):
    return {"/proc/self/cgroup": f"0::{path}\n", "/proc/self/mountinfo": V2_MOUNT, **more}


def test_v2_limit_of_an_ancestor():
    files = v2("/kv.slice/daemon.service")
    files["/sys/fs/cgroup/kv.slice/daemon.service/memory.max"] = "max\n"
    files["/sys/fs/cgroup/kv.slice/memory.max"] = 4 * GIB
    files["/sys/fs/cgroup/kv.slice/memory.current"] = 3 * GIB
    files["/sys/fs/cgroup/kv.slice/memory.stat"] = (
        f"anon {GIB}\nfile {2 * GIB}\nshmem {GIB}\ninactive_file {256 * MIB}\n"
        f"active_file {256 * MIB}\n"
    )
    assert read_headroom(reader(files)) == Headroom(
        free_bytes=GIB + 512 * MIB,
        limit="memory.max = 4,096.00 MiB of cgroup /sys/fs/cgroup/kv.slice",
    )


def test_v2_memory_high_counts_too():
    files = v2("/a")
    files["/sys/fs/cgroup/a/memory.max"] = 4 * GIB
    files["/sys/fs/cgroup/a/memory.high"] = 2 * GIB
    files["/sys/fs/cgroup/a/memory.current"] = GIB
    found = read_headroom(reader(files))
    assert found.free_bytes == GIB
    assert found.limit == "memory.high = 2,048.00 MiB of cgroup /sys/fs/cgroup/a"


def test_over_the_limit_is_zero_not_negative():
    files = v2("/")
    files["/sys/fs/cgroup/memory.max"] = GIB
    files["/sys/fs/cgroup/memory.current"] = 2 * GIB
    assert read_headroom(reader(files)).free_bytes == 0


def test_v1():
    files = {
        "/proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/pod/box\n2:cpuacct:/\n0::/\n",
        "/proc/self/mountinfo": V1_MOUNT + V2_MOUNT,
        "/sys/fs/cgroup/memory/pod/box/memory.limit_in_bytes": 2 * GIB,
        "/sys/fs/cgroup/memory/pod/box/memory.usage_in_bytes": GIB,
        "/sys/fs/cgroup/memory/pod/box/memory.stat": (
            f"inactive_file 1\ntotal_inactive_file {100 * MIB}\ntotal_active_file {MIB}\n"
        ),
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
    }
    found = read_headroom(reader(files))
    assert found.free_bytes == GIB + 101 * MIB
    assert found.limit == (
        "memory.limit_in_bytes = 2,048.00 MiB of cgroup /sys/fs/cgroup/memory/pod/box"
    )


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/docker/abc", "/docker/abc"),  # the host's path, and a mount of that subtree
        ("/docker/abc", "/docker/abc/init"),  # a mount of something else below
        ("/../other", "/"),  # outside of the cgroup namespace
        ("/", "/"),  # a cgroup namespace of its own
    ],
)
def test_in_a_container_the_mount_is_the_limit(path, root):
    files = v2(path)
    files["/proc/self/mountinfo"] = f"31 23 0:28 {root} /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
    files["/sys/fs/cgroup/memory.max"] = GIB
    files["/sys/fs/cgroup/memory.current"] = 0
    assert read_headroom(reader(files)).free_bytes == GIB


def test_a_mount_point_with_a_space():
    files = v2("/a")
    files["/proc/self/mountinfo"] = r"31 23 0:28 / /my\040cgroups rw - cgroup2 none rw" + "\n"
    files["/my cgroups/a/memory.max"] = MIB
    assert read_headroom(reader(files)).free_bytes == MIB


def test_this_machine():
    found = read_headroom()
    assert 0 < found.free_bytes < 1 << 50
    assert found.limit.startswith("MemAvailable") or "of cgroup /" in found.limit


SLAB = 64 * MIB
POLICY = MemoryPolicy(unit_bytes=SLAB, reserve_bytes=100 * MIB)


def ask(asked, free, *, policy=POLICY):
    """check_memory on a virtual clock; `free` is a list of (from second, bytes)."""
    clock = SimClock(seed=1)
    began = clock.monotonic()

    def headroom():
        passed = clock.monotonic() - began
        now_free = [count for second, count in free if second <= passed][-1]
        return Headroom(free_bytes=now_free, limit="the test's limit")

    return check_memory(
        asked, policy=policy, headroom=headroom, now=clock.monotonic, sleep=clock.sleep
    )


def test_what_fits_is_granted_at_once():
    grant = ask(10 * SLAB, [(0, 10 * SLAB + 100 * MIB)])
    assert (grant.granted_bytes, grant.waited_s) == (10 * SLAB, 0.0)
    assert (grant.is_reduced, grant.reason) == (False, "")


def test_a_killed_predecessor_is_waited_for():
    grant = ask(10 * SLAB, [(0, SLAB), (1.95, 20 * SLAB)])
    assert grant.granted_bytes == 10 * SLAB
    assert grant.waited_s == pytest.approx(2.0)


def test_after_five_seconds_whole_slabs_are_granted_and_said(caplog):
    with caplog.at_level(logging.WARNING, "kvtier.tiers.memory"):
        grant = ask(10 * SLAB, [(0, 0), (3, 4 * SLAB + 100 * MIB - 1), (5.1, 99 * SLAB)])
    assert grant.granted_bytes == 3 * SLAB
    assert grant.waited_s == pytest.approx(5.0)
    assert grant.is_reduced
    assert grant.reason == (
        "host.bytes asks for 640.00 MiB and 192.00 MiB fit: the test's limit leaves "
        "356.00 MiB after waiting 5.0 s"
    )
    assert [(r.message, r.reason) for r in caplog.records] == [
        ("host.memory.reduced", grant.reason)
    ]


def test_not_even_one_slab():
    with pytest.raises(NotEnoughMemory) as caught:
        ask(10 * SLAB, [(0, SLAB + 100 * MIB - 1)])
    assert str(caught.value) == (
        "the host tier needs 640.00 MiB (host.bytes) and a reserve of 100.00 MiB; "
        "the test's limit leaves 164.00 MiB"
    )
    assert "host.bytes" in caught.value.remedy
    assert "the test's limit" in caught.value.remedy


@pytest.mark.parametrize("free", [0, 50 * MIB, 100 * MIB])
def test_under_the_reserve_is_nothing(free):
    with pytest.raises(NotEnoughMemory):
        ask(SLAB, [(0, free)])


def test_a_small_arena_is_one_unit_of_its_own_size():
    assert ask(MIB, [(0, 101 * MIB)]).granted_bytes == MIB
    with pytest.raises(NotEnoughMemory):
        ask(2 * MIB, [(0, 101 * MIB)])


def test_no_wait_by_policy():
    policy = MemoryPolicy(unit_bytes=SLAB, reserve_bytes=0, wait_s=0.0)
    grant = ask(4 * SLAB, [(0, 2 * SLAB)], policy=policy)
    assert (grant.granted_bytes, grant.waited_s) == (2 * SLAB, 0.0)


def test_mib():
    assert mib(3 * GIB + 512 * 1024) == "3,072.50 MiB"
