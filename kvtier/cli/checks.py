"""The checks of `kvtier doctor`. Each returns one Finding, and changes nothing on the host."""

from __future__ import annotations

import importlib.util
import mmap
import os
import resource
import shutil
import stat
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvtier.cli.checks_nvme import check_nvme
from kvtier.cli.finding import Finding, Grade, fail, ok, warn
from kvtier.client import connect
from kvtier.config.load import Effective
from kvtier.core.page import Tier
from kvtier.errors import KvtierError
from kvtier.tiers.host import SLAB_BYTES, slab_layout
from kvtier.tiers.memfd import create_sealed, free_huge_bytes
from kvtier.tiers.memory import RESERVE_BYTES, mib, read_headroom

__all__ = ["Finding", "Grade", "run_checks"]

_PYTHON = (3, 11)
_FILES_MIN = 4096
_SLABS_MIN = 8  # each size of page needs slabs of its own, and a slot in use keeps its slab
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


def run_checks(effective: Effective, url: str, *, timeout_s: float) -> list[Finding]:
    """All checks, in order. `url` is where a daemon is expected, `timeout_s` how long it has."""
    host_bytes = effective.config.host.bytes
    checks: list[Callable[[], Finding]] = [
        _python,
        lambda: _extra("torch", "tensors in the client, and fp8 packing without numba"),
        lambda: _extra("numba", "fp8 packing, ten times faster", "pip install 'kvtier[fast]'"),
        lambda: _extra("prometheus_client", "kvtier serve", "pip install 'kvtier[daemon]'"),
        _memfd,
        _populate,
        lambda: _huge_pages(host_bytes),
        lambda: _memory(host_bytes),
        lambda: _slabs(host_bytes),
        _shared_memory,
        _open_files,
        lambda: _directory(effective.config.daemon.directory),
        lambda: _daemon(url, timeout_s),
        _clock,
    ]
    return [*(check() for check in checks), *check_nvme(effective.config.nvme)]


def _python() -> Finding:
    found = f"{sys.implementation.name} {'.'.join(map(str, sys.version_info[:3]))}"
    if sys.version_info < _PYTHON:
        return fail("python", found, "Use Python 3.11 or newer.")
    return ok("python", found)


def _extra(name: str, use: str, remedy: str = "") -> Finding:
    # Looked up, not imported: importing torch takes seconds.
    if importlib.util.find_spec(name) is None:
        return warn(name, f"not installed; needed for {use}", remedy or f"pip install {name}")
    try:
        return ok(name, version(name))
    except PackageNotFoundError:
        return ok(name, "installed, without package metadata")


def _memfd() -> Finding:
    try:
        fd = create_sealed("kvtier-doctor", mmap.PAGESIZE, tier=Tier.HOST, huge_pages=False)
    except KvtierError as error:
        return fail("memfd", str(error), "kvtier needs Linux 3.17 or newer with memfd_create.")
    os.close(fd)
    return ok("memfd", "can be made and sealed")


def _populate() -> Finding:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_POPULATE_WRITE)
        except OSError:
            return warn(
                "populate",
                "no MADV_POPULATE_WRITE: the arena is touched page by page",
                "Linux 5.14 or newer has it; it only makes the start slower.",
            )
    return ok("populate", "MADV_POPULATE_WRITE works")


def _huge_pages(host_bytes: int) -> Finding:
    free = free_huge_bytes()
    if free >= host_bytes:
        return ok("hugepages", f"{mib(free)} free, enough for the arena")
    pages = -(-host_bytes // (2 << 20))
    return warn(
        "hugepages",
        f"{mib(free)} free, the arena needs {mib(host_bytes)}: it will lie in 4 KiB pages",
        f"as root: echo {pages} > /proc/sys/vm/nr_hugepages (faster first touch; optional)",
    )


def _memory(host_bytes: int) -> Finding:
    headroom = read_headroom()
    needed = host_bytes + RESERVE_BYTES
    found = f"{headroom.limit} leaves {mib(headroom.free_bytes)}; host.bytes asks {mib(host_bytes)}"
    if headroom.free_bytes < needed:
        return fail(
            "memory",
            found,
            f"Lower host.bytes to {mib(max(0, headroom.free_bytes - RESERVE_BYTES))} or less, "
            "free memory, or raise the limit (a running daemon's arena counts as taken).",
        )
    return ok("memory", found)


def _slabs(host_bytes: int) -> Finding:
    count = slab_layout(host_bytes).count
    found = f"host.bytes makes {count} slabs"
    if count < _SLABS_MIN:
        return warn(
            "slabs",
            f"{found}: pages of another size, leased or granted ones leave little room",
            f"Set host.bytes to {mib(_SLABS_MIN * SLAB_BYTES)} for each size of page, or more.",
        )
    return ok("slabs", found)


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return ok("/dev/shm", f"not there ({error.strerror}); kvtier does not use it")
    return ok("/dev/shm", f"{mib(usage.total)}; kvtier does not use it (memfd instead)")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FILES_MIN:
        return warn(
            "open files",
            f"limit {soft} (hard {hard}); every client connection takes one",
            f"ulimit -n {_FILES_MIN}, or LimitNOFILE={_FILES_MIN} in the systemd unit",
        )
    return ok("open files", f"limit {soft}")


def _directory(path: Path) -> Finding:
    try:
        found = path.stat()
    except FileNotFoundError:
        return _parent(path)
    except OSError as error:
        return fail("directory", f"{path}: {error.strerror}", "Name another daemon.directory.")
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        return fail("directory", f"{path} is not a directory", "Name another daemon.directory.")
    if found.st_uid != os.geteuid():
        return fail(
            "directory",
            f"{path} belongs to uid {found.st_uid}, you are uid {os.geteuid()}",
            "Run as the owner, or name another daemon.directory.",
        )
    if mode & 0o077:
        return fail(
            "directory", f"{path} has mode {mode:04o}", "name a daemon.directory of its own"
        )
    return ok("directory", f"{path}, mode {mode:04o}")


def _parent(path: Path) -> Finding:
    parent = next(item for item in path.parents if item.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        return fail(
            "directory",
            f"{path} is not there, and {parent} cannot be written",
            f"Make {path} with mode 0700, or name another daemon.directory.",
        )
    return ok("directory", f"{path} is not there yet; the daemon will make it")


def _daemon(url: str, timeout_s: float) -> Finding:
    try:
        with connect(url, deadline=timeout_s) as connection:
            status = connection.status()
    except KvtierError as error:
        return warn("daemon", f"{url}: {error}", f"kvtier serve ({error.remedy})")
    if status.warnings:
        return warn("daemon", f"{status.state}, but: {'; '.join(status.warnings)}", "See its log.")
    return ok("daemon", f"kvtier {status.version} at {url}: {status.state}")


def _clock() -> Finding:
    clock = time.get_clock_info("monotonic")
    source_file = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = source_file.read_text().strip() if source_file.exists() else "unknown source"
    found = f"monotonic, {source}, resolution {clock.resolution * 1e9:.0f} ns"
    if source in ("hpet", "acpi_pm", "jiffies"):
        return warn("clock", found, "A slow clock costs microseconds a call; use tsc if possible.")
    return ok("clock", found)
