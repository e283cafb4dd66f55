"""`kvtier chat`: conversations with a real server, by a person and through a pipe."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen, run

import pytest

from kvtier_engine.chat.client import ChatServer
from kvtier_engine.chat.errors import ServerAbsent
from kvtier_engine.engine import Engine
from tests.engine.chat_rig import (
    command,
    deaf,
    held,
    server_at,
)
from tests.engine.engine_rig import engine_of, tiny_model
from tests.engine.server_rig import Served, serve, until


@pytest.fixture
def served() -> Iterator[Served]:
    yield from serve(engine_of(tiny_model(), pages=200))


def test_turns_go_on_from_what_was_said_and_say_where_the_prompt_came_from(served: Served) -> None:
    conversation, out, errors = held(
        server_at(served.port), "tell me about pages\n", "\n", "more\n", "/quit\n", "never said\n"
    )
    assert (errors, conversation.failures) == ("", 0)
    first, second = re.findall(r"^\[(.*)\]$", out, flags=re.MULTILINE)
    asked = len("user: tell me about pages\nassistant:")
    assert re.match(
        rf"{asked} prompt tokens: {asked} computed; first token after \d+\.\d\d s; ", first
    )
    assert first.endswith(" s; cut off (--max-tokens)")
    assert "; 10 tokens in " in first
    match = re.match(r"(\d+) prompt tokens: (\d+) from the device, (\d+) computed;", second)
    assert match is not None
    prompt, cached, computed = map(int, match.groups())
    assert (cached, computed) == (asked // 8 * 8, prompt - cached)
    assert prompt > asked
    assert served.engine.stats()["requests"] == 2


def test_reset_forgets_and_help_helps(served: Served) -> None:
    _, out, _ = held(server_at(served.port), "abc\n", "/reset\n", "/help\n", "abc\n")
    assert "[forgotten]\n[/reset forgets" in out
    asked = len("user: abc\nassistant:")
    assert len(re.findall(rf"\[{asked} prompt tokens: ", out)) == 2


def test_an_answer_that_fails_is_as_if_nothing_was_said(served: Served) -> None:
    conversation, out, errors = held(server_at(served.port), "a" * 600, "abc")
    assert conversation.failures == 1
    assert "do not fit into 512" in errors
    assert "\nremedy: say /reset to begin anew" in errors
    asked = len("user: abc\nassistant:")
    assert f"[{asked} prompt tokens: " in out


def test_a_full_queue_and_a_server_that_ends_are_told(served: Served) -> None:
    served.engine.close()
    _, _, errors = held(server_at(served.port), "abc")
    assert "the engine is closed" in errors
    assert "remedy: try again in a moment" in errors


def test_models_are_asked_for(served: Served) -> None:
    assert server_at(served.port).model() == "tiny"
    with_path = ChatServer(
        f"127.0.0.1:{served.port}/v1/", connect_seconds_max=20.0, silence_seconds_max=40.0
    )
    assert with_path.model() == "tiny"


def test_without_a_server_it_says_how_to_start_one() -> None:
    message = "no server at http://127.0.0.1:"
    with deaf() as port, pytest.raises(ServerAbsent, match=message) as caught:
        server_at(port).model()
    assert caught.value.remedy == f"start one with: kvtier engine --port {port}"


def test_through_a_pipe(served: Served) -> None:
    words = command(served.port, "--temperature", "0", "--max-tokens", "5")
    done = run(words, input="abc\n/reset\nabc", capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(" prompt tokens: ") == 2
    assert "> " not in done.stdout
    done = run(words, input="a" * 600, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_the_command_without_a_server() -> None:
    with deaf() as port:
        done = run(command(port), input="abc\n", capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "remedy: start one with: kvtier engine" in done.stderr
    assert "Traceback" not in done.stderr


def slowed(engine: Engine) -> None:
    """So that Ctrl-C comes in the middle of an answer."""
    step, wait = engine.step, threading.Event()
    engine.step = lambda: (wait.wait(0.02), step())[1]  # type: ignore[method-assign]


@contextmanager
def in_a_terminal(words: list[str]) -> Iterator[tuple[Popen[bytes], int]]:
    """The process, and what writes as a person types. Its output is a pipe."""
    main, terminal = pty.openpty()
    try:
        with Popen(words, stdin=terminal, stdout=PIPE, stderr=PIPE) as process:
            os.close(terminal)
            try:
                yield process, main
            finally:
                process.kill()
    finally:
        os.close(main)


def test_ctrl_c_stops_the_answer_and_then_the_conversation(served: Served) -> None:
    slowed(served.engine)
    words = command(served.port, "--temperature", "0", "--max-tokens", "400")
    with in_a_terminal(words) as (process, typed):
        assert process.stdout is not None
        said = _Said(process.stdout.fileno())
        os.write(typed, b"tell me everything\n")
        until(lambda: served.engine.stats().get("decode_tokens", 0) > 3)
        process.send_signal(signal.SIGINT)
        said.until("; stopped]\n")
        until(lambda: not served.engine.has_work)
        os.write(typed, b"/help\n")
        said.until("Ctrl-C stops an answer]")
        process.send_signal(signal.SIGINT)
        assert process.wait(50) == 130
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


class _Said:
    """What comes out of a process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = ""

    def until(self, end: str) -> None:
        while end not in self._text:
            assert select.select([self._fd], [], [], 40)[0], self._text
            data = os.read(self._fd, 1 << 16)
            assert data, self._text
            self._text += data.decode()


def test_the_end_of_the_input_ends_it(served: Served) -> None:
    with in_a_terminal(command(served.port)) as (process, typed):
        os.write(typed, b"\x04")
        out, errors = process.communicate(timeout=50)
    assert process.returncode == 0
    assert b"tiny at http://127.0.0.1:" in out
    assert b"Traceback" not in errors
