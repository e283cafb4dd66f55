"""A peer's process, which answers a round at a time (see rounds.py). Promise: its processes are a
group of their own, of which none is left behind. One thread.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from benchmarks.peers.environments import Environment

__all__ = ["PeerFailed", "Running", "running"]

#: Also the first answer: a compiled engine takes minutes to begin.
ROUND_S_MAX = 600.0
END_S_MAX = 20.0
_REPO = Path(__file__).resolve().parent.parent.parent


class PeerFailed(Exception):
    """A peer ended or did not answer in time."""


class Running:
    """A peer's process, asked for a round at a time."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._log = log
        self._stdin: IO[str] = process.stdin
        self._stdout: IO[str] = process.stdout
        self.version = str(self._answer()["version"])

    def round(self) -> dict[str, float]:
        with suppress(BrokenPipeError):  # why it ended is said by the answer that does not come
            self._stdin.write("round\n")
            self._stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        readable, _, _ = select.select([self._stdout], [], [], ROUND_S_MAX)
        if not readable:
            raise PeerFailed(f"no answer in {ROUND_S_MAX:g} s")
        line = self._stdout.readline()
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S_MAX)
            status = self._process.returncode
            said = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line for line in reversed(said) if line.strip()), "and no word")
            raise PeerFailed(f"it ended with {status}: {last.strip()}")
        return json.loads(line)


@contextmanager
def running(
    environment: Environment,
    name: str,
    module: str,
    words: Sequence[str],
    variables: Mapping[str, str],
) -> Iterator[Running]:
    """Its `module`, with these words. What it logs is kept beside its environment."""
    log = environment.home / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(environment.python), "-m", module, *words],
            cwd=_REPO,
            env=environment.variables() | dict(variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    try:
        yield Running(process, log)
    finally:
        for end in (process.stdin, process.stdout):
            assert end is not None
            with suppress(BrokenPipeError):
                end.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S_MAX)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_S_MAX)
