"""Peers: absent, broken and answering ones, without any of them installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers import beside, install
from benchmarks.peers.environments import Environment
from benchmarks.plan import Plan
from benchmarks.rows import Missing

FAKE = """
import sys
from benchmarks.peers.rounds import answers, serve
out = answers()
print("a library that talks")
serve(out, "1.2", lambda number: {"put-1": 2.0 + number, "lookup-1-us": 5.0})
"""
PEER = beside.Peer(
    name="fake-mode",
    environment="fake",
    module="fake_peer",
    words=(),
    by=beside.By.NOTHING,
    targets={},
    unequal="it is fake",
)


def made(home: Path, script: str) -> Environment:
    """An environment whose python is this shell script."""
    environment = Environment(name="fake", root=home)
    environment.python.parent.mkdir(parents=True)
    environment.python.write_text(f"#!/bin/sh\n{script}\n")
    environment.python.chmod(0o755)
    return environment


def test_absent_peers_are_one_line(tmp_path):
    found = list(beside.rows(Plan(quick=True), tmp_path))
    assert found == [Missing(name="peers", reason="run make bench-peers")]


def test_a_peer_answers_round_by_round(tmp_path):
    (tmp_path / "fake_peer.py").write_text(FAKE)
    repo = Path(beside.__file__).parent.parent.parent
    environment = made(tmp_path, f'PYTHONPATH={tmp_path}:{repo} exec {sys.executable} "$@"')
    plan = Plan(quick=True)
    with beside.started(PEER, environment, plan, 32) as running:
        rows = list(beside.rows_of(PEER, plan, running, None))
    put, lookup = rows
    assert put.name == "peers/fake-mode-put-1"
    assert (put.value, put.low, put.high, put.rounds) == (3.5, 3.0, 4.0, 2)
    assert put.what == "fake, mode 1.2: put, 2 MiB pages, 1 a call"
    assert put.note == "it is fake"
    assert (lookup.name, lookup.unit) == ("peers/fake-mode-lookup-1", "us")
    assert (environment.home / "fake-mode.log").read_text() == "a library that talks\n"


def test_a_peer_that_ends_says_why(tmp_path):
    environment = made(tmp_path, "echo no such luck >&2; exit 3")
    with (
        pytest.raises(beside.PeerFailed, match=r"^it ended with 3: no such luck$"),
        beside.started(PEER, environment, Plan(), 32),
    ):
        pass


def test_what_cannot_be_installed_is_said(tmp_path):
    environment = made(tmp_path, "echo no matching distribution; exit 1")
    recipe = install.Recipe(installs=(("nothing-of-this-name",),), module="nothing")
    with pytest.raises(install.Failed, match=r"pip install .*nothing-of-this-name:\n.*no matching"):
        install.install(environment, recipe)
    assert not environment.is_installed()


def test_missing_system_libraries_are_named_where_they_cannot_be_fetched(tmp_path, monkeypatch):
    said = "libx.so.1: cannot open shared object file"
    environment = made(tmp_path, f'case "$1" in -c) echo {said}; exit 1;; esac')
    monkeypatch.setenv("PATH", "/nowhere")
    recipe = install.Recipe(installs=(("x",),), module="x", system=("libx1",))
    with pytest.raises(install.Failed, match="the system libraries of libx1, and there is no apt"):
        install.install(environment, recipe)
    assert not environment.is_installed()


def test_what_a_peer_must_not_have_is_removed_before_it_is_loaded(tmp_path):
    environment = made(tmp_path, f'echo "$*" >> {tmp_path}/said')
    recipe = install.Recipe(installs=(("x",),), module="x", removed=("y", "z"))
    install.install(environment, recipe)
    said = (tmp_path / "said").read_text().splitlines()
    assert said[1:] == ["-m pip uninstall -q -y y z", "-c import x"]


def test_an_installed_peer_is_left_as_it_is(tmp_path):
    environment = made(tmp_path, "exit 0")
    recipe = install.Recipe(installs=(("x==1", "y"),), module="x")
    install.install(environment, recipe)
    assert environment.stamp.read_text() == "x==1 y\n"
    environment.python.write_text("#!/bin/sh\nexit 1\n")
    install.install(environment, recipe)
    assert environment.is_installed()
