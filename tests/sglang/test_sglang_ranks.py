"""Two ranks of one server, each a process with a host pool of its own, on one daemon."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from pool_rig import PAGES
from sglang_rig import HERE

import kvtier
from tests.forks import daemon_of_its_own

_ANSWER_S = 60.0


class Rank:
    """A rank of rank_process. Close it."""

    def __init__(self, parent: socket.socket, url: str, rank: int, attention: str) -> None:
        asked, self._asking = os.pipe()
        self._answers, answering = os.pipe()
        socket.send_fds(parent, [json.dumps([url, rank, attention]).encode()], [asked, answering])
        os.close(asked)
        os.close(answering)

    def ask(self, what: str, prompt: int = 0):
        self.send(what, prompt)
        return self.answer()

    def send(self, what: str, prompt: int = 0) -> None:
        os.write(self._asking, json.dumps([what, prompt]).encode() + b"\n")

    def answer(self):
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._answers], [], [], _ANSWER_S)
            more = os.read(self._answers, 1 << 16) if ready else b""
            assert more, "the rank does not answer"
            line += more
        return json.loads(line)

    def close(self) -> None:
        """It ends when it is asked nothing more; one that hangs is killed with its parent."""
        os.close(self._asking)
        select.select([self._answers], [], [], _ANSWER_S)
        os.close(self._answers)


@pytest.fixture(scope="module")
def parent() -> Iterator[socket.socket]:
    """Where ranks are forked: a process that has loaded their code."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "rank_process.py"), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        yield ours
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


@pytest.fixture
def make_ranks(parent):
    with ExitStack() as stack:

        def make(daemon, attention: str) -> list[Rank]:
            ranks = [Rank(parent, daemon.url, number, attention) for number in range(2)]
            for rank in ranks:
                stack.callback(rank.close)
            assert [rank.answer() for rank in ranks] == ["ready"] * 2
            return ranks

        yield make


def pages_sealed(daemon):
    with kvtier.connect(daemon.url, deadline=5) as kv:
        return kv.status().tiers[0].pages_sealed


def test_latent_pages_are_stored_once_and_read_by_all(daemon, make_ranks):
    ranks = make_ranks(daemon, "latent")
    assert ranks[0].ask("set") == [True] * PAGES
    assert pages_sealed(daemon) == PAGES
    assert [rank.ask("exists") for rank in ranks] == [PAGES] * 2
    for rank in ranks:
        rank.send("get")
    assert [rank.answer() for rank in ranks] == [[True] * PAGES] * 2


def test_a_page_without_its_sibling_is_a_miss_for_all(daemon, make_ranks):
    """Each rank reads what it has written, and a page only counts while all have their part."""
    ranks = make_ranks(daemon, "heads")
    assert ranks[0].ask("set") == [True] * PAGES
    assert [rank.ask("exists") for rank in ranks] == [0, 0]
    assert ranks[1].ask("set") == [True] * PAGES
    assert pages_sealed(daemon) == 4 * PAGES
    for rank in ranks:
        rank.send("get")
    assert [rank.answer() for rank in ranks] == [[True] * PAGES] * 2
    assert ranks[1].ask("delete") == 1
    assert [rank.ask("exists") for rank in ranks] == [5, 5]
    assert ranks[1].ask("get") == [True] * 5 + [False] * (PAGES - 5)


def test_under_pressure_ranks_have_the_same_pages(forker, make_ranks):
    """Far more than the arena holds, from both at once: what is left of a prompt is the same."""
    with daemon_of_its_own(forker, "host.bytes=4MiB") as small:
        ranks = make_ranks(small, "heads")
        prompts = range(30)
        for prompt in prompts:
            for rank in ranks:
                rank.send("set", prompt)
            for rank in ranks:
                rank.answer()
        found = [[rank.ask("exists", prompt) for rank in ranks] for prompt in prompts]
        assert all(one == other for one, other in found), found
        assert 0 < sum(one for one, _ in found) < PAGES * len(prompts)
