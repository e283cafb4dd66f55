"""`kvtier chat`: conversations with a real server, and with servers that are none."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen, run

import pytest

from kvtier_engine.chat.client import Asking, ChatServer
from kvtier_engine.chat.conversation import Conversation
from kvtier_engine.chat.errors import ServerAbsent, ServerUnreadable, UrlInvalid
from kvtier_engine.engine import Engine
from tests.engine.engine_rig import engine_of, tiny_model
from tests.engine.server_rig import Served, serve, until

# The command as `kvtier` loads it, without the entry point of an installation.
CODE = """
import argparse, sys
from kvtier.cli import foreign, main
from kvtier_engine.chat import command
entry = argparse.Namespace(name="chat", load=lambda: command.register)
foreign.entry_points = lambda group: [entry]
sys.exit(main(["chat", *sys.argv[1:]]))
"""
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
EVENT = b'data: {"choices": [{"delta": {"content": "so \\u001b[2Jfar"}}]}\n\n'


@pytest.fixture
def served() -> Iterator[Served]:
    yield from serve(engine_of(tiny_model(), pages=200))


def server_at(port: int, silence: float = 40.0) -> ChatServer:
    return ChatServer(
        f"http://127.0.0.1:{port}", connect_seconds_max=20.0, silence_seconds_max=silence
    )


def held(server: ChatServer, *lines: str, max_tokens: int = 10) -> tuple[Conversation, str, str]:
    """The conversation, what it said, and what it said of errors."""
    out, errors = io.StringIO(), io.StringIO()
    asking = Asking(model="tiny", temperature=0.0, max_tokens=max_tokens, user="somebody")
    conversation = Conversation(server, asking, out, errors)
    conversation.hold(iter(lines))
    return conversation, out.getvalue(), errors.getvalue()


def take_request(taken: socket.socket) -> None:
    """All of it: a connection that is closed over unread bytes is reset, and the answer lost."""
    said = b""
    while b"\r\n\r\n" not in said:
        said += taken.recv(1 << 16)
    head, _, body = said.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    while length is not None and len(body) < int(length[1]):
        body += taken.recv(1 << 16)


@contextmanager
def answering(*answers: bytes | None) -> Iterator[int]:
    """The port of a server that says these, one a connection; None says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def serve_all() -> None:
            for answer in answers:
                taken, _ = listener.accept()
                with taken:
                    take_request(taken)
                    if answer is None:
                        ended.wait(50)
                    else:
                        taken.sendall(answer)

        thread = threading.Thread(target=serve_all)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            thread.join()


def test_turns_go_on_from_what_was_said_and_say_where_the_prompt_came_from(served: Served) -> None:
    conversation, out, errors = held(
        server_at(served.port), "tell me about pages\n", "\n", "more\n", "/quit\n", "never said\n"
    )
    assert (errors, conversation.failures) == ("", 0)
    first, second = re.findall(r"^\[(.*)\]$", out, flags=re.MULTILINE)
    asked = len("user: tell me about pages\nassistant:")
    assert first.startswith(f"{asked} prompt tokens: {asked} computed; first token after 0.")
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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ServerAbsent, match=f"no server at http://127.0.0.1:{port}: ") as caught:
        server_at(port).model()
    assert caught.value.remedy == f"start one with: kvtier engine --port {port}"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-whatever\r\n", "BadStatusLine"),
        (b"", "closed connection without response"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "no JSON came"),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", "no JSON object came"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"data": [{}]}', "its list of models is none"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, "no JSON came"),
        (b"HTTP/1.1 502 Bad\r\n\r\nno", "no JSON came"),
    ],
    ids=["another protocol", "nothing", "html", "a list", "no name", "deep", "a proxy"],
)
def test_a_server_of_something_else_is_told(answer: bytes, said: str) -> None:
    with answering(answer) as port, pytest.raises(ServerUnreadable) as caught:
        server_at(port).model()
    text = str(caught.value)
    assert said in text or type(caught.value.__cause__).__name__ == said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (OK + EVENT, "it ended in the middle of the answer"),
        (OK + EVENT + b"data: {", "it ended in the middle of the answer"),
        (OK + EVENT + b"data: {\n\n", "no JSON came"),
        (OK + EVENT + b"data: 3\n\n", "no JSON object came"),
        (OK + EVENT + b'data: {"error": {"message": "lost"}}\n\n', "answers: lost"),
        (b'HTTP/1.1 429 Wait\r\n\r\n{"error": {"message": "full"}}', "answers: full"),
        (b'HTTP/1.1 500 Bad\r\n\r\n{"error": null}', "answers: status 500"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "no answer of OpenAI"),
    ],
    ids=["cut", "cut line", "no JSON", "number", "event", "full", "no words", "chunks"],
)
def test_whatever_the_server_does_is_one_error_of_one_answer(answer: bytes, said: str) -> None:
    whole = OK + EVENT + b"data: [DONE]\n\n"
    with answering(answer, whole) as port:
        conversation, out, errors = held(server_at(port), "one", "two")
    assert conversation.failures == 1
    assert said in errors
    assert errors.count("\nremedy: ") == 1
    assert out.count("so \ufffd[2Jfar") == (2 if EVENT in answer else 1)
    assert "\x1b" not in out


def test_a_server_that_hangs_is_not_waited_for() -> None:
    with answering(None) as port:
        _, _, errors = held(server_at(port, silence=0.2), "one")
    assert "says nothing for 0.2 s" in errors


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://a@b", "http://[x"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UrlInvalid):
        ChatServer(url, connect_seconds_max=1.0, silence_seconds_max=1.0)


def command(port: int, *words: str) -> list[str]:
    return [sys.executable, "-c", CODE, "--url", f"http://127.0.0.1:{port}", *words]


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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
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
