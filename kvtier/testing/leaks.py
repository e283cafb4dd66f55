"""After a test everything is back to the start: descriptors, threads, children, shared memory,
temporary files.

Use: `pytest -p kvtier.testing.leaks`, or `from kvtier.testing.leaks import leak_audit` in a
conftest.py; then every test there is audited. A test that must leave something behind says why:
`@pytest.mark.leaks_allowed("reason")`. Outside pytest: `with no_leaks(): ...`.

Promise: what is reported came into being during the test and still was there `grace_s` after its
end; the report names it. Native threads of libraries (OpenMP, grpc pollers) are not counted, for
libraries keep them on purpose. Thread rule: call from one thread; threads that others start
meanwhile count as leaks.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest

__all__ = ["LeakError", "Snapshot", "leak_audit", "leaks_since", "no_leaks"]

#: On a busy machine gRPC takes seconds to let go of a connection; only what is left waits so long.
GRACE_S = 10.0
_POLL_S = 0.02
_SHM = Path("/dev/shm")
_PROC = Path("/proc")

#: What makes a thing the same thing, and the words to report it with.
_Found: TypeAlias = tuple[tuple[str, str], str]


class LeakError(AssertionError):
    """Something is left; the message names all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What this process holds at one moment."""

    found: dict[tuple[str, str], str]
    threads: frozenset[threading.Thread]

    @classmethod
    def take(cls, directories: Sequence[Path] = ()) -> Snapshot:
        """Look at the process, at /dev/shm, and for `*.tmp` below `directories`."""
        found = dict([*_descriptors(), *_maps(), *_children(), *_shared_memory()])
        for directory in directories:
            for path in directory.rglob("*.tmp"):
                found["file", str(path)] = f"temporary file {path}"
        return cls(found=found, threads=frozenset(threading.enumerate()))

    def new_since(self, before: Snapshot) -> list[str]:
        """One line for each thing that `before` does not have."""
        things = [words for key, words in self.found.items() if key not in before.found]
        threads = [
            f"thread {thread.name!r} (daemon={thread.daemon})"
            for thread in self.threads - before.threads
        ]
        return sorted(things) + sorted(threads)


def leaks_since(
    before: Snapshot, *, directories: Sequence[Path] = (), grace_s: float = GRACE_S
) -> list[str]:
    """What is new and does not go away within `grace_s`. Returns at once when nothing is new."""
    deadline = time.monotonic() + grace_s
    collected = False
    while True:
        new = Snapshot.take(directories).new_since(before)
        left = [words for words in new if not _is_of_others(words)]
        if not left or time.monotonic() >= deadline:
            return left
        if not collected:
            # Garbage in a cycle is not a leak, only late.
            gc.collect()
            collected = True
            continue
        time.sleep(_POLL_S)


@contextmanager
def no_leaks(*directories: Path, grace_s: float = GRACE_S) -> Iterator[None]:
    """Raise LeakError if the block leaves something behind and does not raise itself."""
    before = Snapshot.take(directories)
    yield
    left = leaks_since(before, directories=directories, grace_s=grace_s)
    if left:
        raise LeakError(_report(left))


@pytest.fixture(autouse=True)
def leak_audit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Audit the test that uses it: set up first, so it looks after all other teardown."""
    if request.node.get_closest_marker("leaks_allowed") is not None:
        yield
        return
    before = Snapshot.take()
    yield
    directory = (getattr(request.node, "funcargs", None) or {}).get("tmp_path")
    directories = [directory] if isinstance(directory, Path) else []
    left = leaks_since(before, directories=directories)
    if left:
        pytest.fail(_report(left), pytrace=False)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "leaks_allowed(reason): the test leaves something behind on purpose"
    )


def _report(left: list[str]) -> str:
    return "left behind:\n  " + "\n  ".join(left)


def _descriptors() -> Iterator[_Found]:
    for entry in (_PROC / "self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the listing's own, closed since
        yield ("descriptor", f"{entry.name} {target}"), f"descriptor {entry.name} -> {target}"


def _maps() -> Iterator[_Found]:
    """Mapped memfds: their memory stays taken after the descriptor is closed."""
    text = _text(_PROC / "self/maps")
    for line in text.splitlines() if "/memfd:" in text else ():
        if "/memfd:" in line:  # a large process has hundreds of others
            # address range, permissions, offset, device, inode, name
            *_, inode, name = line.split(maxsplit=5)
            yield ("map", inode), f"memory map of {name.split()[0]} (inode {inode})"


def _children() -> Iterator[_Found]:
    """Children of any state: one that has ended and nobody waited for is a leak too."""
    for child in _child_ids():
        entry = _PROC / child
        # After the name in parentheses, which may hold anything: the state.
        state = _text(entry / "stat").rpartition(")")[2].split()[:1]
        if state:  # else it is gone since
            command = _text(entry / "cmdline").replace("\0", " ").strip()
            words = f"child process {child} (state {state[0]}) {command}".rstrip()
            yield ("child", child), words


def _child_ids() -> list[str]:
    me = str(os.getpid())
    if (_PROC / "self/task" / me / "children").exists():
        # Each thread has its own, and the kernel knows them: no look at every process there is. A
        # child that ends meanwhile can hide others (proc(5)), so the answer has to come twice.
        found, again = _children_of_threads(), _children_of_threads()
        while found != again:
            found, again = again, _children_of_threads()
        return found
    stats = (
        (entry.name, _text(entry / "stat").rpartition(")")[2].split())
        for entry in _PROC.iterdir()
        if entry.name.isdigit()
    )
    return [name for name, fields in stats if fields[1:2] == [me]]


def _children_of_threads() -> list[str]:
    tasks = (_PROC / "self/task").iterdir()
    return [child for task in tasks for child in _text(task / "children").split()]


def _shared_memory() -> Iterator[_Found]:
    """But semaphores: kvtier has none, and other programs that are killed leave theirs here."""
    if _SHM.is_dir():
        for entry in _SHM.iterdir():
            if not entry.name.startswith("sem."):
                yield ("shm", entry.name), f"shared memory {entry}"


def _is_of_others(words: str) -> bool:
    """A line about shared memory that another living process uses: it runs beside this test."""
    path = words.removeprefix("shared memory ")
    if path == words:
        return False
    users = (entry for entry in _PROC.iterdir() if entry.name.isdigit())
    return any(
        f" {path}\n" in _text(user / "maps") for user in users if user.name != str(os.getpid())
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
