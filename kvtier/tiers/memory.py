"""How much memory the host tier may take, and the wait for memory that a killed predecessor still
holds.

Promise: `check_memory` never grants more than the machine and every cgroup above this process have
left after the reserve; it grants less than was asked only with a sentence that says so, and nothing
at all only with NotEnoughMemory. A memfd counts as this process's memory in the cgroup that touches
it first, and over the limit the kernel kills instead of failing a call: so the answer is asked for
before memory is touched.
`check_address_space` asks for address space, where that is limited.

Thread rule: functions without state; files, clock and sleep come in as arguments.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from kvtier.errors import NotEnoughMemory

__all__ = [
    "RESERVE_BYTES",
    "Headroom",
    "MemoryGrant",
    "MemoryPolicy",
    "ReadText",
    "check_address_space",
    "check_memory",
    "mib",
    "read_headroom",
    "read_text",
]

log = logging.getLogger(__name__)

#: What stays free for the daemon's own heap, its clients and the kernel.
RESERVE_BYTES = 256 << 20
#: cgroup v1 writes "no limit" as a number near 2^63.
_V1_UNLIMITED = 1 << 62
#: Address space that the index and the directory take for each page that they can hold.
_INDEX_BYTES_PER_PAGE = 512
#: And what threads and their heaps take (measured on two cores: 300 MiB are too little).
_THREADS_BYTES = 512 << 20

#: A file's text by its absolute path; raises OSError where there is no such file.
ReadText: TypeAlias = Callable[[str], str]


def read_text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="surrogateescape")


def mib(count: int) -> str:
    """`count` bytes for people."""
    return f"{count / (1 << 20):,.2f} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """Bytes that may still be taken before the tightest limit, and what that limit is."""

    free_bytes: int
    limit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicy:
    """How `check_memory` decides. `unit_bytes` is what a smaller grant is made of: the slab."""

    unit_bytes: int
    reserve_bytes: int = RESERVE_BYTES
    wait_s: float = 5.0
    poll_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrant:
    """`granted_bytes` may be taken; it is `asked_bytes`, or less and then whole units."""

    asked_bytes: int
    granted_bytes: int
    waited_s: float
    headroom: Headroom

    @property
    def is_reduced(self) -> bool:
        return self.granted_bytes < self.asked_bytes

    @property
    def reason(self) -> str:
        """Why less was granted, for the log and status; empty if all was."""
        if not self.is_reduced:
            return ""
        return (
            f"host.bytes asks for {mib(self.asked_bytes)} and {mib(self.granted_bytes)} fit: "
            f"{self.headroom.limit} leaves {mib(self.headroom.free_bytes)} "
            f"after waiting {self.waited_s:.1f} s"
        )


def check_memory(
    asked_bytes: int,
    *,
    policy: MemoryPolicy,
    headroom: Callable[[], Headroom] | None = None,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> MemoryGrant:
    """Decide how much of `asked_bytes` may be taken; wait up to `policy.wait_s` for all to fit.

    Clients of a daemon that was killed keep its arena alive until they notice, hence the wait.
    Raises NotEnoughMemory if not even one unit (or `asked_bytes`, if that is less) fits.
    """
    ask = headroom or read_headroom
    began = now()
    found = ask()
    while found.free_bytes - policy.reserve_bytes < asked_bytes:
        left = began + policy.wait_s - now()
        if left <= 0:
            break
        sleep(min(policy.poll_s, left))
        found = ask()
    fits = max(0, found.free_bytes - policy.reserve_bytes)
    granted = asked_bytes
    if fits < asked_bytes:
        granted = fits - fits % min(policy.unit_bytes, asked_bytes)
    if granted == 0:
        raise NotEnoughMemory(
            f"the host tier needs {mib(asked_bytes)} (host.bytes) and a reserve of "
            f"{mib(policy.reserve_bytes)}; {found.limit} leaves {mib(found.free_bytes)}",
            remedy=f"lower host.bytes (now {asked_bytes}), free memory, or raise {found.limit}",
        )
    grant = MemoryGrant(
        asked_bytes=asked_bytes, granted_bytes=granted, waited_s=now() - began, headroom=found
    )
    if grant.is_reduced:
        log.warning("host.memory.reduced", extra={"reason": grant.reason})
    return grant


def check_address_space(
    host_bytes: int,
    *,
    index_pages: int,
    reserve_bytes: int = _THREADS_BYTES,
    read: ReadText = read_text,
) -> None:
    """Raises NotEnoughMemory unless RLIMIT_AS leaves room to map the arena and the index, and the
    reserve: a library that gets no thread for want of it ends the process without a word of why.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        used = int(read("/proc/self/statm").split()[0]) * resource.getpagesize()
    except OSError:
        return  # without /proc nobody can tell; mapping the arena will
    free = max(0, limit - used)
    index_bytes = index_pages * _INDEX_BYTES_PER_PAGE
    if free < host_bytes + index_bytes + reserve_bytes:
        raise NotEnoughMemory(
            f"the host tier needs {mib(host_bytes)} of address space (host.bytes), "
            f"{mib(index_bytes)} for its index and a reserve of {mib(reserve_bytes)}; "
            f"RLIMIT_AS = {mib(limit)} leaves {mib(free)}",
            remedy=f"lower host.bytes (now {host_bytes}), or raise the limit (ulimit -v, LimitAS=)",
        )


def read_headroom(read: ReadText = read_text) -> Headroom:
    """The tightest of MemAvailable and all memory cgroups (v1 and v2) that this process is in.

    A file that is not there sets no limit; without /proc/meminfo the answer is 0 bytes.
    """
    return min(_headrooms(read), key=lambda found: found.free_bytes)


def _headrooms(read: ReadText) -> Iterator[Headroom]:
    yield Headroom(free_bytes=_available_bytes(read), limit="MemAvailable in /proc/meminfo")
    for directory, is_v2 in _memory_cgroups(read):
        limit_names = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
        used_name = "memory.current" if is_v2 else "memory.usage_in_bytes"
        for name in limit_names:
            limit = _number(read, f"{directory}/{name}")
            if limit is None or limit >= _V1_UNLIMITED:
                continue
            used = _number(read, f"{directory}/{used_name}") or 0
            held = max(0, used - _reclaimable_bytes(read, directory, is_v2=is_v2))
            words = f"{name} = {mib(limit)} of cgroup {directory}"
            yield Headroom(free_bytes=max(0, limit - held), limit=words)


def _available_bytes(read: ReadText) -> int:
    for line in _lines(read, "/proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    return 0


def _reclaimable_bytes(read: ReadText, directory: str, *, is_v2: bool) -> int:
    """File pages, which the kernel drops before it kills. An arena counts as shmem, not here."""
    prefix = "" if is_v2 else "total_"
    wanted = (f"{prefix}inactive_file", f"{prefix}active_file")
    total = 0
    for line in _lines(read, f"{directory}/memory.stat"):
        name, _, value = line.partition(" ")
        if name in wanted:
            total += int(value)
    return total


def _memory_cgroups(read: ReadText) -> Iterator[tuple[str, bool]]:
    """(directory, is v2) of this process's memory cgroups, each with its ancestors."""
    paths: dict[bool, str] = {}
    for line in _lines(read, "/proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[True] = path
        elif "memory" in controllers.split(","):
            paths[False] = path
    for line in _lines(read, "/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, mount_point = (_unescaped(word) for word in before.split(" ")[3:5])
        is_v2 = kind == "cgroup2"
        if not is_v2 and not (kind == "cgroup" and "memory" in options.split(",")):
            continue
        if is_v2 in paths:
            yield from ((d, is_v2) for d in _up_to_mount(paths[is_v2], root, mount_point))


def _up_to_mount(path: str, root: str, mount_point: str) -> Iterator[str]:
    """The process's own cgroup and all above it. A container's mount shows only a subtree."""
    inside = PurePosixPath("/")
    if PurePosixPath(path).is_relative_to(root) and ".." not in PurePosixPath(path).parts:
        inside = PurePosixPath("/") / PurePosixPath(path).relative_to(root)
    for part in (inside, *inside.parents):
        yield (mount_point + str(part)).rstrip("/") or "/"


def _unescaped(word: str) -> str:
    for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        word = word.replace(code, character)
    return word


def _number(read: ReadText, path: str) -> int | None:
    lines = _lines(read, path)
    return int(lines[0]) if lines and lines[0].isdigit() else None  # "max" is no limit


def _lines(read: ReadText, path: str) -> list[str]:
    try:
        return read(path).splitlines()
    except OSError:
        return []
