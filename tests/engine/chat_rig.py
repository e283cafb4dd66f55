"""Conversations, and servers that say what a test wants."""

from __future__ import annotations

import io
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier_engine.chat.client import Asking, ChatServer
from kvtier_engine.chat.conversation import Conversation

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


NOTHING = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'


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


def take_request(taken: socket.socket) -> bytes:
    """All of it: a connection that is closed over unread bytes is reset, and the answer lost."""
    said = b""
    while b"\r\n\r\n" not in said:
        said += taken.recv(1 << 16)
    head, _, body = said.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    while length is not None and len(body) < int(length[1]):
        body += taken.recv(1 << 16)
    return head + b"\r\n\r\n" + body


@contextmanager
def deaf() -> Iterator[int]:
    """A port on which nobody listens, and nobody else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextmanager
def answering(*answers: bytes | None, asked: list[bytes] | None = None) -> Iterator[int]:
    """The port of a server that says these, one a connection; None says nothing. What it was asked
    goes into `asked`.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def serve_all() -> None:
            for answer in answers:
                taken, _ = listener.accept()
                with taken:
                    request = take_request(taken)
                    if asked is not None:
                        asked.append(request)
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


MODELS = b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "t\\u001b[2Jiny"}]}'


def command(port: int, *words: str) -> list[str]:
    return [sys.executable, "-c", CODE, "--url", f"http://127.0.0.1:{port}", *words]
