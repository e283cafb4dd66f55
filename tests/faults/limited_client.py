"""A client that may use less than it wants, in a process of its own.

    python -m tests.faults.limited_client URL MEMLOCK [LIMIT WHEN ROOM]...

runs once for each three: connects, and from then on (WHEN `first`), or once it reads shared memory
(`later`), has only ROOM more bytes of address space (LIMIT `as`) or ROOM more descriptors
(`nofile`) than it has by then; puts and gets pages. Says what came of each in a line of JSON. With
WHEN `first-back` or `later-back` it then waits, without the limit, until it uses shared memory. It
may lock MEMLOCK bytes of memory.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kvtier
from tests.faults.local_roles import PAGES

_WAIT_S_MAX = 30.0
_BACK_S_MAX = 8.0


@contextmanager
def _limited(name: str, room: int) -> Iterator[None]:
    which, now = {"as": (resource.RLIMIT_AS, _mapped), "nofile": (resource.RLIMIT_NOFILE, _fds)}[
        name
    ]
    before = resource.getrlimit(which)
    with now() as used:
        resource.setrlimit(which, (used + room, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(which, before)


@contextmanager
def _mapped() -> Iterator[int]:
    """Bytes of address space that are used."""
    statm = Path("/proc/self/statm").read_text(encoding="ascii").split()
    yield int(statm[0]) * resource.getpagesize()


@contextmanager
def _fds() -> Iterator[int]:
    """The lowest descriptor such that neither it nor a higher one is used; all below are."""
    most = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1
    fillers = [os.dup(0)]
    while fillers[-1] < most:
        fillers.append(os.dup(0))
    try:
        yield fillers[-1] + 1
    finally:
        for fd in fillers:
            os.close(fd)


def _settled(condition: Callable[[], object], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _turn(ns: kvtier.Namespace, numbers: range) -> tuple[list[str], list[str]]:
    """Puts pages and gets them; a wrong byte raises AssertionError."""
    pages = [PAGES.page(number) for number in numbers]
    put = ns.put(PAGES.keys(numbers), pages, chain=False)
    return [code.name for code in put.reasons], [code.name for code in PAGES.get(ns, numbers)]


def _run(url: str, name: str, when: str, room: int, *, first: int) -> dict[str, object]:
    def opened() -> kvtier.Namespace:
        ns, waiting = kv.namespace(PAGES.layout), ("attaching", "no namespace was opened yet")
        assert _settled(lambda: kv.local.reason not in waiting, _WAIT_S_MAX), kv.local
        return ns

    with kvtier.connect(url, deadline=10) as kv:
        kv.status()  # what gRPC needs is there
        early = opened() if when.startswith("later") else None
        with _limited(name, room):
            ns = early or opened()
            turns = [_turn(ns, range(first + at, first + at + 4)) for at in (0, 4)]
            local = kv.local
        numbers = iter(range(first + 8, first + 1000))

        def is_back() -> bool:
            number = next(numbers)
            _turn(ns, range(number, number + 1))
            return kv.local.is_attached and not kv.local.not_writing

        return {
            "put": [code for codes, _ in turns for code in codes],
            "got": [code for _, codes in turns for code in codes],
            "attached": local.is_attached,
            "reason": local.reason,
            "not_writing": local.not_writing,
            "stored": local.puts.stored,
            "hits": local.counts.hits,
            "back": not when.endswith("back") or _settled(is_back, _BACK_S_MAX),
        }


def _main(url: str, memlock: str, *cases: str) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(memlock), int(memlock)))
    kvtier.warm_up()
    idle = 0
    for turn, (name, when, room) in enumerate(
        zip(cases[::3], cases[1::3], cases[2::3], strict=True)
    ):
        said = _run(url, name, when, int(room), first=10_000 * (turn + 1))
        if not turn:
            time.sleep(0.3)  # gRPC closes its own a little later
            idle = len(os.listdir("/proc/self/fd"))
        _settled(lambda: len(os.listdir("/proc/self/fd")) <= idle, 2.0)  # noqa: B023
        fds = len(os.listdir("/proc/self/fd")) - idle
        maps = Path("/proc/self/maps").read_text(encoding="ascii").count("memfd:kvtier")
        sys.stdout.write(json.dumps(said | {"fds": fds, "maps": maps}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
