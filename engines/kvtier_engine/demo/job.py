"""What the processes of the demo tell each other: a job as one argument, a result as one line.

Each child runs as `python -m kvtier_engine.demo.<module> JOB` and prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import KvtierError
from kvtier_engine.errors import DemoFailed

__all__ = ["PAGE_TOKENS", "QUESTIONS", "Job", "answer", "ask"]

PAGE_TOKENS = 64
#: One a turn.
QUESTIONS = (
    "Summarise these notes.",
    "Where does the station stand?",
    "What does the helicopter bring?",
    "Why is the book written with a pencil?",
)
#: A child loads a model and computes for some seconds; past this it hangs.
CHILD_SECONDS_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Where the daemon and the model are, how much to generate, and what was said until now: pairs
    of role and text.
    """

    url: str
    daemon_pid: int
    model_dir: str
    tokens: int
    messages: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_json(cls, text: str) -> Job:
        read = json.loads(text)
        messages = tuple((role, said) for role, said in read.pop("messages"))
        return cls(**read, messages=messages)

    def text(self) -> str:
        """What the chat is about."""
        return (Path(__file__).parent / "prompt.txt").read_text(encoding="utf-8")


def ask(module: str, job: Job) -> dict[str, Any]:
    """Runs a child process to its end; its result. Raises DemoFailed with what the child said."""
    command = [sys.executable, "-m", f"kvtier_engine.demo.{module}", json.dumps(asdict(job))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CHILD_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DemoFailed(
            f"the {module} process did not end within {CHILD_SECONDS_MAX} s",
            remedy="run it again on a machine with less to do",
        ) from error
    if done.returncode:
        raise DemoFailed(
            f"the {module} process ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}",
            remedy="the message of the process says what failed",
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def answer(work: Callable[[Job], dict[str, Any]]) -> int:
    """The main function of a child: does the job in argv, prints the result; the exit code."""
    try:
        result = work(Job.from_json(sys.argv[1]))
    except KvtierError as error:
        print(f"{type(error).__name__}: {error}\n{error.remedy}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0
