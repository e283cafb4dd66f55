"""Kind 16, DISKFULL, a device that is read-only: what is on it is served, nothing is lost by boots
in which it is so, and it is used again when it can be written.

The file system is a real one of its own, so only root can run this.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_rig import GetCode, Pages, until, warnings_of

from kvtier.cli import main
from kvtier.tiers.nvme_directory import read_identity
from kvtier.tiers.nvme_journal import journal_paths

HIT, MISS = GetCode.HIT, GetCode.MISS
PAGES = Pages(16 << 10)
NUMBERS = range(50)
SETTINGS = ("nvme.bytes=32MiB", "nvme.checkpoint_s=0.3", "nvme.retry_s=0.2")


@pytest.fixture
def small(base: Path) -> Iterator[Callable[[str], Path]]:
    """A file system of 64 MiB; calling it makes it "rw" or "ro"."""
    path = base / "small"
    path.mkdir(mode=0o700)
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "kvtier-test", str(path)]
    try:
        made = subprocess.run(mounting, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if made.returncode:
        pytest.skip(f"no right to mount: {made.stderr.decode(errors='replace')}")

    def remount(how: str) -> Path:
        subprocess.run(["mount", "-o", f"remount,{how}", str(path)], check=True)
        return path

    yield remount
    subprocess.run(["umount", "-l", str(path)], check=True)


def noted_journal(device: Path) -> int:
    identity = read_identity(device)
    assert identity is not None
    return identity.noted.journal


def namespace(connect, daemon):
    return connect(daemon).namespace(PAGES.layout)


@pytest.mark.parametrize(
    ("others", "ends_by"),
    [
        (0, "stop"),
        (1, "kill"),
        pytest.param(1, "stop", marks=pytest.mark.soak),
        pytest.param(0, "kill", marks=pytest.mark.soak),
    ],
)
def test_a_boot_on_a_read_only_device_serves_its_pages(
    make_daemon, connect, base, small, ends_by, others, capsys
):
    n0 = small("rw") / "n0"
    paths = [n0, *(base / f"other{n}" for n in range(others))]
    daemon = make_daemon(f"nvme.paths={','.join(map(str, paths))}", *SETTINGS)
    ns = namespace(connect, daemon.start())
    PAGES.put(ns, NUMBERS)
    daemon.stop()

    small("ro")
    for deleted in (0, 1):
        kv = connect(daemon.start())
        ns = kv.namespace(PAGES.layout)
        assert PAGES.get(ns, NUMBERS) == [MISS] * deleted + [HIT] * (len(NUMBERS) - deleted)
        assert f"{n0} is read-only" in warnings_of(kv)
        ns.delete(PAGES.keys([deleted]))
        # More than there is room for: none of the others may have to go for what finds no place.
        for begin in range(100, 1100, 200):
            ns.put(
                PAGES.keys(range(begin, begin + 200)),
                [PAGES.page(n) for n in range(begin, begin + 200)],
                durable="nvme",
                chain=False,
            )
        kv.close()
        getattr(daemon, ends_by)()
    small("rw")
    assert main(["fsck", str(daemon.directory)]) == 0, capsys.readouterr().out
    kv = connect(daemon.start())
    ns = kv.namespace(PAGES.layout)
    found = PAGES.get(ns, NUMBERS)
    assert found[:2] == [MISS] * 2
    if not others:
        assert found[2:] == [HIT] * (len(NUMBERS) - 2)
    assert "read-only" not in warnings_of(kv)
    PAGES.put(ns, [5000])


def test_a_device_that_can_be_written_again_is_used_again(make_daemon, connect, small):
    n0 = small("rw") / "n0"
    daemon = make_daemon(f"nvme.paths={n0}", *SETTINGS)
    ns = namespace(connect, daemon.start())
    PAGES.put(ns, NUMBERS)
    daemon.stop()
    small("ro")
    kv = connect(daemon.start())
    ns = kv.namespace(PAGES.layout)
    put = ns.put([PAGES.key(90)], [PAGES.page(90)], durable="nvme")
    assert (put.stored, put.durable) == (1, 0)
    newest = max(journal_paths(daemon.directory))
    assert noted_journal(n0) < newest, "nothing can be noted there"
    assert "nvme.device_not_noted" not in daemon.log, "what is known is not said again"
    small("rw")
    daemon.wait_logged("nvme.device_writable")
    assert until(lambda: noted_journal(n0) >= newest)
    PAGES.put(ns, range(91, 99))
    assert PAGES.get(ns, NUMBERS) == [HIT] * len(NUMBERS)
    assert "read-only" not in warnings_of(kv)
    kv.close()
    daemon.stop()
    ns = namespace(connect, daemon.start())
    assert PAGES.get(ns, [*NUMBERS, *range(91, 99)]) == [HIT] * (len(NUMBERS) + 8)


def test_nvme_bytes_of_which_no_segment_fits(make_daemon, connect, small):
    """The warning says so, and its remedy helps."""
    n0 = small("rw") / "n0"
    first = make_daemon(f"nvme.paths={n0}", "nvme.bytes=1GiB")
    kv = connect(first.start())
    ns = kv.namespace(PAGES.layout)
    put = ns.put(PAGES.keys(NUMBERS), [PAGES.page(n) for n in NUMBERS], durable="nvme")
    assert (put.stored, put.durable) == (len(NUMBERS), 0)
    said = warnings_of(kv)
    assert f"a segment takes {64 << 20} bytes there" in said
    assert "set nvme.bytes to what the file system holds" in said
    kv.close()
    first.stop()
    daemon = make_daemon(f"nvme.paths={n0}", "nvme.bytes=48MiB").start("--discard-cache")
    PAGES.put(namespace(connect, daemon), NUMBERS)
