"""`kvtier chat` and servers that are others, are none, or say what a terminal would obey."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import socket
import sys
import threading
import time
from subprocess import run

import pytest

from kvtier_engine.chat import command as chat_command
from kvtier_engine.chat.client import ChatServer
from kvtier_engine.chat.errors import KeyInvalid, ServerUnreadable, UrlInvalid
from kvtier_engine.chat.harmless import harmless
from tests.engine.chat_rig import (
    EVENT,
    MODELS,
    NOTHING,
    OK,
    answering,
    command,
    held,
    server_at,
    take_request,
)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-whatever\r\n", "BadStatusLine"),
        (b"", "closed connection without response"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "no JSON came"),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", "no JSON object came"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"data": [{}]}', "its list of models is none"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, "no JSON came"),
    ],
    ids=["another protocol", "nothing", "html", "a list", "no name", "deep"],
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
        (b"HTTP/1.1 502 Bad\r\n\r\nno", "answers: status 502 Bad"),
        (b"HTTP/1.1 500 Bad\r\n\r\n[1]", "answers: status 500 Bad"),
        (b"HTTP/1.1 301 Moved\r\nlocation: x\r\n\r\n", "the --url of the server itself"),
        (b"HTTP/1.1 401 Who\r\ncontent-length: 2\r\n\r\nno", "401 Who\nremedy: pass the key"),
        (b"SSH-2.0-\x1b[2J\r\n", "SSH-2.0-\ufffd[2J"),
        (
            b'HTTP/1.1 500 Bad\r\n\r\n{"error": {"message": "a\\u001b]0;b\\u0007\\nremedy: c"}}',
            "answers: a\ufffd]0;b\ufffd remedy: c\nremedy: see",
        ),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "no answer of OpenAI"),
    ],
    ids=[
        "cut",
        "cut line",
        "no JSON",
        "number",
        "event",
        "full",
        "no words",
        "proxy",
        "list",
        "moved",
        "key",
        "other",
        "escape",
        "chunks",
    ],
)
def test_whatever_the_server_does_is_one_error_of_one_answer(answer: bytes, said: str) -> None:
    whole = OK + EVENT + b"data: [DONE]\n\n"
    with answering(answer, whole) as port:
        conversation, out, errors = held(server_at(port), "one", "two")
    assert conversation.failures == 1
    assert said in errors
    assert errors.count("\nremedy: ") == 1
    assert out.count("so \ufffd[2Jfar") == (2 if EVENT in answer else 1)
    assert "\x1b" not in out + errors


def test_a_server_that_hangs_is_not_waited_for() -> None:
    with answering(None) as port:
        _, _, errors = held(server_at(port, silence=0.2), "one")
    assert "says nothing of an answer for 0.2 s" in errors


@pytest.mark.parametrize(
    ("begun", "dripped"),
    [(b"HTTP/1.1 200 OK\r\nx: ", b"y"), (OK, b": ping\n\n"), (OK, NOTHING), (OK + EVENT, b": p\n")],
    ids=["head", "comments", "empty deltas", "after a token"],
)
def test_signs_of_life_are_no_answer(begun: bytes, dripped: bytes) -> None:
    """Each of them comes in time: it is the answer that does not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def drip() -> None:
            taken, _ = listener.accept()
            with taken, contextlib.suppress(OSError):
                take_request(taken)
                taken.sendall(begun)
                while not ended.wait(0.05):
                    taken.sendall(dripped)

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            _, _, errors = held(server_at(listener.getsockname()[1], silence=0.5), "one")
        finally:
            ended.set()
            thread.join()
    assert "says nothing of an answer for 0.5 s" in errors


def test_tokens_that_come_in_time_are_waited_for() -> None:
    """Together they take longer than one may; also those of a part that is not shown."""
    thought = b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n'
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def say() -> None:
            taken, _ = listener.accept()
            with taken:
                take_request(taken)
                taken.sendall(OK)
                for said in (thought, EVENT, thought, EVENT):
                    time.sleep(0.6)
                    taken.sendall(said)
                taken.sendall(b"data: [DONE]\n\n")

        thread = threading.Thread(target=say)
        thread.start()
        try:
            _, out, errors = held(server_at(listener.getsockname()[1], silence=2.0), "one")
        finally:
            thread.join()
    assert errors == ""
    assert out.count("far") == 2


def test_other_servers_words_for_the_same() -> None:
    answer = OK + EVENT.replace(b'{"choices', b'{"error": null, "choices').replace(b": {", b":{")
    with answering(answer + b"data:[DONE]\n\n") as port:
        conversation, out, errors = held(server_at(port), "one")
    assert (conversation.failures, errors) == (0, "")
    assert "far" in out


def test_all_that_is_no_control_is_shown_as_it_is() -> None:
    shown = "Bonjour\u00a0! \u3000 \U0001f468\u200d\U0001f469 \u0645\u200c\n\t"
    assert harmless(shown) == shown
    assert harmless("a\u202eb\x9bc\x7fd\ud800e\r") == "a\ufffdb\ufffdc\ufffdd\ufffde\ufffd"


def test_half_a_character_does_not_stay_in_the_conversation() -> None:
    halves = b'{"choices": [{"delta": {"content": "\\ud83d"}}]}\n\ndata: '
    halves += b'{"choices": [{"delta": {"content": "\\ude00 \\ud800"}}]}\n\ndata: [DONE]\n\n'
    asked: list[bytes] = []
    with answering(OK + b"data: " + halves, OK + EVENT + b"data: [DONE]\n\n", asked=asked) as port:
        conversation, out, _ = held(server_at(port), "one \udcff", "two")
    assert conversation.failures == 0
    out.encode()
    messages = json.loads(asked[1].partition(b"\r\n\r\n")[2])["messages"]
    said = [message["content"] for message in messages]
    assert said == ["one \ufffd", "\U0001f600 \ufffd", "two"]


def test_the_key_is_sent_and_none_goes_to_whoever_listens_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-env\n")
    parser = argparse.ArgumentParser()
    chat_command.register(parser.add_subparsers())
    monkeypatch.setattr(sys, "stdin", io.StringIO("one"))
    for words, key in (([], b"sk-env"), (["--api-key", "sk-given"], b"sk-given")):
        asked: list[bytes] = []
        monkeypatch.setattr(sys, "stdin", io.StringIO("one"))
        with answering(MODELS, OK + EVENT + b"data: [DONE]\n\n", asked=asked) as port:
            args = parser.parse_args(["chat", "--url", f"http://127.0.0.1:{port}", *words])
            assert args.run(args) == 0
        assert [b"authorization: Bearer %b\r\n" % key in one for one in asked] == [True, True]
    asked = []
    with answering(MODELS, OK + EVENT + b"data: [DONE]\n\n", asked=asked) as port:
        monkeypatch.setattr(chat_command, "_URL", f"http://127.0.0.1:{port}")
        args = parser.parse_args(["chat"])
        monkeypatch.setattr(sys, "stdin", io.StringIO("one"))
        assert args.run(args) == 0
    assert len(asked) == 2
    assert not any(b"authorization" in one.lower() for one in asked)


@pytest.mark.parametrize("key", ["a\nb", "k\u00e9y", "\x1b"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(KeyInvalid) as caught:
        ChatServer("http://x", connect_seconds_max=1.0, silence_seconds_max=1.0, key=key)
    assert key not in f"{caught.value}{caught.value.remedy}"


def test_what_a_terminal_of_another_encoding_cannot_show_is_replaced() -> None:
    """And what it says that is no text; the name of the model is harmless as well."""
    answer = OK + 'data: {"choices": [{"delta": {"content": "caf\u00e9 \u4f60"}}]}\n\n'.encode()
    asked: list[bytes] = []
    with answering(MODELS, answer + b"data: [DONE]\n\n", asked=asked) as port:
        words = command(port)
        done = run(
            words,
            input=b"hi \xff there",
            capture_output=True,
            timeout=50,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"caf? ?\n[")
    assert json.loads(asked[1].partition(b"\r\n\r\n")[2])["messages"][0]["content"]


def test_an_error_of_the_server_before_the_first_turn_is_harmless() -> None:
    answer = b'HTTP/1.1 500 Bad\r\n\r\n{"error": "\\u001b]0;owned\\u0007"}'
    with answering(answer) as port:
        done = run(command(port), input="abc\n", capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "answers: \ufffd]0;owned\ufffd\n" in done.stderr


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "http://",
        "http://x:port",
        "http://a@b",
        "http://[x",
        "http://.foo",
        "http://x/\u00e9",
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UrlInvalid):
        ChatServer(url, connect_seconds_max=1.0, silence_seconds_max=1.0)
