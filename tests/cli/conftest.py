"""A real daemon for the commands, and a way to run them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.cli import main as command_line
from tests.client.fake_daemon import FakeDaemon
from tests.forks import ForkedDaemon, Forker

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def daemon(forker: Forker) -> Iterator[ForkedDaemon]:
    base = Path(tempfile.mkdtemp(prefix="kvt-"))
    with ForkedDaemon(forker, base) as running:
        yield running
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def kvtier(forker: Forker) -> Run:
    """Runs `kvtier WORDS...` in a process of its own, with an environment of its own."""

    def run(*words: str, env: dict[str, str] | None = None):
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"} | (env or {})
        return forker.run(words, environment, timeout_s=30)

    return run


@pytest.fixture
def fake(tmp_path):
    made = FakeDaemon(tmp_path / "d.sock")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def main(fake, capfd):
    """Runs `kvtier COMMAND --url ... WORDS`: (exit code, standard output, standard error)."""

    def run(command: str, *words: object):
        code = command_line([*command.split(), "--url", fake.url, *map(str, words)])
        out, err = capfd.readouterr()
        return code, out, err

    return run
