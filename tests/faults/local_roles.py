"""What the clients of a `local_crew` do; a module of its own, which runs in the clients' process.

    python -m tests.faults.local_roles DESCRIPTOR

forks a client for each message at the socket. Takes the client's code apart where a test is to hold
it. A role has the process to itself.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import kvtier
from kvtier.client.local_channel import Grant, LocalChannel
from kvtier.client.local_channel import Pages as Common
from kvtier.client.local_put import LocalPut
from kvtier.errors import ForkedClient
from kvtier.packing.bulk_sums import load_summer
from kvtier.transfer.local.loading import load_kernels
from kvtier.transfer.planes.deadline import Deadline
from tests.client.local_rig import attached
from tests.faults.fault_rig import Pages
from tests.faults.local_fuzz import Fuzzer

__all__ = ["MESSAGE_BYTES_MAX", "PAGE", "PAGES", "STEPS", "common", "granted"]

PAGE = 60_000
PAGES = Pages(PAGE, "local")
#: Where a put can be held: the client has ...
STEPS = {
    "before": "slots, and has copied nothing into them",
    "half": "copied half of every page of a slice",
    "copied": "copied and summed a slice, and not named it",
    "sent": "named its pages, and not read the answer",
    "answered": "ended its put, and has slots for the next",
}
MESSAGE_BYTES_MAX = 1 << 12


class Hands:
    """What a role has: the daemon's address, and lines to and from its test."""

    def __init__(self, url: str, hears: TextIO, says: TextIO) -> None:
        self.url = url
        self._hears, self._says = hears, says

    def say(self, what: Any) -> None:
        self._says.write(json.dumps(what) + "\n")
        self._says.flush()

    def hear(self) -> str:
        line = self._hears.readline()
        if not line:
            os._exit(1)  # the test has ended
        return line.strip()

    def hold(self) -> None:
        self.say("there")
        self.hear()

    def stop(self) -> None:
        """The whole process, until it is told to go on."""
        self.say("there")
        os.kill(os.getpid(), signal.SIGSTOP)

    @contextmanager
    def opened(
        self, deadline: float = 20.0, pages: Pages = PAGES
    ) -> Iterator[tuple[kvtier.Connection, kvtier.Namespace]]:
        with kvtier.connect(self.url, deadline=deadline) as kv:
            ns = kv.namespace(pages.layout)
            attached(kv)
            yield kv, ns


def put(ns: kvtier.Namespace, first: int, count: int, **options: Any) -> list[str]:
    numbers = range(first, first + count)
    pages = [PAGES.page(number) for number in numbers]
    return [item.reason.name for item in ns.put(PAGES.keys(numbers), pages, chain=False, **options)]


def hold_at(step: str, hold: Callable[[], None]) -> None:
    """The next put of this process calls `hold` when it has come so far."""
    copy, settle = LocalPut._copy, LocalPut._settle
    waits = [hold]

    def wait() -> None:
        if waits:
            waits.pop()()

    def held_copy(self: LocalPut, indices: list[int], grants: list[Any]) -> bytes:
        if step == "half" and waits:
            for index, grant in zip(indices, grants, strict=True):
                begin = (grant.slot + 1) * 4096
                half = self._writer.rows.load(index)[: self._length // 2]
                self._channel._arena[begin : begin + len(half)] = half
        if step in ("before", "half"):
            wait()
        sums = copy(self, indices, grants)
        if step == "copied":
            wait()
        return sums

    def held_settle(self: LocalPut, *, wait: bool) -> bool:
        if step == "sent" and waits and any(pages for pages, _ in self._under_way.values()):
            waits.pop()()
        return settle(self, wait=wait)

    LocalPut._copy, LocalPut._settle = held_copy, held_settle  # type: ignore[method-assign]


def put_held(
    hands: Hands, *, step: str, first: int, count: int, stops: bool = False, deadline: float = 20.0
) -> None:
    """Puts `count` pages, and so gets as many slots, and the next `count`, held at `step` once;
    then what became of them, and again with the next for as long as it is told to."""
    with hands.opened(deadline) as (kv, ns):
        put(ns, first, count)
        if step != "answered":
            hold_at(step, hands.stop if stops else hands.hold)
        while True:
            before, began = kv.local.puts, time.monotonic()
            first += count
            codes = put(ns, first, count)
            took_s = time.monotonic() - began
            puts = {
                name: number - getattr(before, name)
                for name, number in asdict(kv.local.puts).items()
            }
            maps = Path("/proc/self/maps").read_text(encoding="ascii").count("memfd:kvtier")
            if step == "answered":
                hands.hold()
            hands.say({"codes": codes, "took_s": took_s, "maps": maps, "first": first, **puts})
            hands.hear()


def put_loop(hands: Hands, *, first: int, seed: int) -> None:
    """Puts pages and deletes them until it is killed."""
    rng = random.Random(seed)
    with hands.opened() as (_, ns):
        put(ns, first, 4)
        hands.say("there")
        while True:
            numbers = range(first + rng.randrange(200), first + 200)[: rng.randrange(1, 12)]
            put(ns, numbers.start, len(numbers))
            if rng.random() < 0.3:
                ns.delete(PAGES.keys(numbers))


def get_held(hands: Hands, *, first: int, count: int) -> None:
    """Is held in the middle of a get."""
    with hands.opened() as (kv, ns):
        put(ns, first, count)
        link = kv._async.link.local._standing.attached.reads.link

        class Summer:
            def copy(self, *args: Any) -> Any:
                hands.hold()
                return load_summer().copy(*args)

        link.summer = Summer()
        hands.say([code.name for code in PAGES.get(ns, range(first, first + count))])


def lease_held(hands: Hands, *, first: int, count: int) -> None:
    with hands.opened() as (_, ns):
        put(ns, first, count)
        with ns.lease(PAGES.keys(range(first, first + count))) as held:
            assert len([view for view in held.views() if view is not None]) == count
            hands.hold()


def common(ns: kvtier.Namespace, length: int = PAGE) -> Common:
    """What the pages of a WRITE to this namespace have in common."""
    opened = ns._async.opened
    return Common(
        session_id=opened.session_id,
        namespace=opened.namespace_number,
        shard=0,
        length=length,
        session="",
        ttl_ms=0,
        priority=0,
    )


def granted(kv: kvtier.Connection, ns: kvtier.Namespace) -> tuple[LocalChannel, list[Grant]]:
    """A writer with as many slots as the daemon gives."""
    writer = LocalChannel.attach(
        kv.capabilities().local_socket,
        Deadline.after(5),
        boot_id=ns._async.opened.boot_id,
        client_name="by hand",
    )
    writer.send(common(ns), Deadline.after(5), wanted=1000)
    writer.receive(Deadline.after(5))
    return writer, writer.take(PAGE, 1000)


def write_on(hands: Hands) -> None:
    """Its socket is closed, and it goes on writing to what it was granted."""
    with hands.opened() as (kv, ns):
        writer, grants = granted(kv, ns)
        writer._control.close()
        noise = random.Random(1).randbytes(PAGE)

        def write() -> None:
            while True:
                for grant in grants:
                    begin = (grant.slot + 1) * 4096
                    writer._arena[begin : begin + PAGE] = bytearray(noise)

        threading.Thread(target=write, daemon=True).start()
        hands.say(len(grants))
        hands.hear()


def hoard(hands: Hands, *, first: int, count: int) -> None:
    """Takes slots with one writer after the other and closes their sockets, until it gets none;
    then what became of a put of its own."""
    with hands.opened() as (kv, ns):
        taken = []
        while not taken or taken[-1]:
            writer, grants = granted(kv, ns)
            writer._control.close()
            taken.append(len(grants))
        hands.say(taken)
        hands.hear()
        codes = put(ns, first, count)
        hands.say({"codes": codes, **asdict(kv.local.puts)})
        hands.hear()


def fork_in_put(hands: Hands, *, first: int, count: int) -> None:
    """Forks while another thread puts; the child tries to put too, and ends."""
    with hands.opened() as (kv, ns):
        put(ns, first, 1)
        is_there, goes_on = threading.Event(), threading.Event()

        def hold() -> None:
            is_there.set()
            goes_on.wait(20)

        hold_at("half", hold)
        codes: list[str] = []
        thread = threading.Thread(target=lambda: codes.extend(put(ns, first + 1, count)))
        thread.start()
        is_there.wait(20)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                put(ns, first, 1)
            except ForkedClient:
                code = 7
            mapped = "kvtier-arena" in Path("/proc/self/maps").read_text(encoding="ascii")
            del kv, ns
            os._exit(code + 32 * mapped)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        hands.hold()
        goes_on.set()
        thread.join(20)
        hands.say({"child": status, "codes": codes, **asdict(kv.local.puts)})
        hands.hear()


def fuzz(hands: Hands, *, seed: int, seconds: float, writers: int, noise: bool) -> None:
    """Sends what it must not, and writes where it must not; what it saw."""
    with hands.opened() as (kv, ns):
        hands.say("there")
        fuzzer = Fuzzer(kv, ns, PAGES, seed=seed, is_noisy=noise)
        hands.say(fuzzer.run(seconds, writers))
        hands.hear()


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role
    for role in (put_held, put_loop, get_held, lease_held, write_on, hoard, fork_in_put, fuzz)
}


def _serve(channel: socket.socket) -> None:
    """Until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        message, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES_MAX, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(channel.detach())
            request = json.loads(message)
            with os.fdopen(fds[1]) as hears, os.fdopen(fds[0], "w") as says:
                ROLES[request["role"]](Hands(request["url"], hears, says), **request["options"])
            return
        for fd in fds:
            os.close(fd)
        channel.send(str(pid).encode())


if __name__ == "__main__":
    load_kernels()
    load_summer()
    _serve(socket.socket(fileno=int(sys.argv[1])))
