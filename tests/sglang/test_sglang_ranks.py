"""Two ranks of one server, each a process with a host pool of its own, on one daemon."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from contextlib import ExitStack

import pytest
from pool_rig import PAGES
from sglang_rig import HERE

import kvtier
from tests.forks import daemon_of_its_own

_ANSWER_S = 60.0


class Rank:
    """A rank_process. Close it."""

    def __init__(self, url: str, rank: int, attention: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "rank_process.py"), url, str(rank), attention],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )

    def ask(self, what: str, prompt: int = 0):
        self.send(what, prompt)
        return self.answer()

    def send(self, what: str, prompt: int = 0) -> None:
        self._process.stdin.write(json.dumps([what, prompt]).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self):
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_S)
        line = self._process.stdout.readline() if ready else b""
        assert line, "the rank does not answer"
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def make_ranks(daemon):
    with ExitStack() as stack:

        def make(attention: str) -> list[Rank]:
            ranks = [Rank(daemon.url, number, attention) for number in range(2)]
            for rank in ranks:
                stack.callback(rank.close)
            assert [rank.answer() for rank in ranks] == ["ready"] * 2
            return ranks

        yield make


def pages_sealed(daemon):
    with kvtier.connect(daemon.url, deadline=5) as kv:
        return kv.status().tiers[0].pages_sealed


def test_latent_pages_are_stored_once_and_read_by_all(daemon, make_ranks):
    ranks = make_ranks("latent")
    assert ranks[0].ask("set") == [True] * PAGES
    assert pages_sealed(daemon) == PAGES
    assert [rank.ask("exists") for rank in ranks] == [PAGES] * 2
    for rank in ranks:
        rank.send("get")
    assert [rank.answer() for rank in ranks] == [[True] * PAGES] * 2


def test_a_page_without_its_sibling_is_a_miss_for_all(daemon, make_ranks):
    """Each rank reads what it has written, and a page only counts while all have their part."""
    ranks = make_ranks("heads")
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


def test_under_pressure_ranks_have_the_same_pages(forker):
    """Far more than the arena holds, from both at once: what is left of a prompt is the same."""
    with daemon_of_its_own(forker, "host.bytes=4MiB") as small, ExitStack() as stack:
        ranks = [Rank(small.url, number, "heads") for number in range(2)]
        for rank in ranks:
            stack.callback(rank.close)
        assert [rank.answer() for rank in ranks] == ["ready"] * 2
        prompts = range(30)
        for prompt in prompts:
            for rank in ranks:
                rank.send("set", prompt)
            for rank in ranks:
                rank.answer()
        found = [[rank.ask("exists", prompt) for rank in ranks] for prompt in prompts]
        assert all(one == other for one, other in found), found
        assert 0 < sum(one for one, _ in found) < PAGES * len(prompts)
