"""The server over real sockets: what clients of OpenAI's API send, and what they must get back."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.engine_rig import engine_of, tiny_model
from tests.engine.server_rig import Served, serve

MESSAGES = [{"role": "user", "content": "tell me about pages of tokens"}]


@pytest.fixture
def served() -> Iterator[Served]:
    yield from serve(engine_of(tiny_model(), queue_requests_max=8))


def events(text: str) -> list[Any]:
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


def test_a_chat_whole_and_streamed(served: Served) -> None:
    path, asked = (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 12, "ignore_eos": True},
    )
    status, whole, _ = served.post(path, **asked)
    assert status == 200
    assert (whole["object"], whole["model"]) == ("chat.completion", "tiny")
    choice = whole["choices"][0]
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")
    prompt = "user: tell me about pages of tokens\nassistant:"
    assert whole["usage"]["prompt_tokens"] == len(prompt)
    assert whole["usage"]["completion_tokens"] == 12
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    status, text, headers = served.post(
        path, **asked, stream=True, stream_options={"include_usage": True}
    )
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    *chunks, usage, done = events(text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert said == choice["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    cached = len(prompt) // 8 * 8
    details = usage["usage"]["prompt_tokens_details"]
    assert (usage["choices"], details["cached_tokens"]) == ([], cached)
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert details["cached_tokens_by_tier"]["device"] == cached


def test_a_completion_with_logprobs_and_a_list_of_tokens(served: Served) -> None:
    path = "/v1/completions"
    _, by_text, _ = served.post(path, prompt="abcdef", max_tokens=3, logprobs=2, ignore_eos=True)
    ids = served.engine.model.tokenizer.encode("abcdef")
    _, by_ids, _ = served.post(path, prompt=ids, max_tokens=3, logprobs=2, ignore_eos=True)
    assert by_text["object"] == "text_completion"
    assert by_text["choices"] == by_ids["choices"]
    logprobs = by_text["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 3
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    assert logprobs["token_logprobs"][0] == max(logprobs["top_logprobs"][0].values())


def test_the_bytes_of_tokens_are_those_of_the_text(served: Served) -> None:
    """Also of tokens that are a part of a character: a client puts them together."""
    tokenizer = served.engine.model.tokenizer
    byte_of: dict[int, int] = {}
    points = (range(0x800), range(0x1000, 0xD000, 0x1000), range(0x10000, 0x110000, 0x40000))
    for point in itertools.chain(*points):
        byte_of |= zip(tokenizer.encode(chr(point)), chr(point).encode(), strict=True)
    expected = {tokenizer.token_text(token): [byte] for token, byte in byte_of.items()}
    asked = {"messages": MESSAGES, "max_tokens": 40, "ignore_eos": True}
    _, answer, _ = served.post("/v1/chat/completions", **asked, logprobs=True, top_logprobs=20)
    entries = answer["choices"][0]["logprobs"]["content"]
    shown = [one for each in entries for one in (each, *each["top_logprobs"])]
    known = [one for one in shown if one["token"] in expected]
    assert len(known) > 40 * 15
    assert {one["token"]: one["bytes"] for one in known if one["bytes"][0] >= 0x80}
    assert all(one["bytes"] == expected[one["token"]] for one in known)


def test_models_health_and_metrics(served: Served) -> None:
    _, models, _ = served.call("GET", "/v1/models")
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert served.call("GET", "/v1/models/tiny")[0] == 200
    assert served.call("GET", "/health")[:2] == (200, {"status": "ok"})
    served.post("/v1/completions", prompt="ab", max_tokens=1)
    _, metrics, _ = served.call("GET", "/metrics")
    assert "# TYPE kvtier_engine_requests_done_total counter" in metrics
    assert "kvtier_engine_requests_done_total 1\n" in metrics
    assert "kvtier_engine_pages 64\n" in metrics
    served.engine.close()
    assert served.call("GET", "/health")[0] == 503
    assert served.post("/v1/completions", prompt="ab")[0] == 503


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[1]", 400),
        ("POST", "/v1/completions", b"[" * 100_000, 400),
        ("POST", "/v1/completions", {"model": "other", "prompt": "a"}, 404),
        ("POST", "/v1/chat/completions", {"model": "tiny", "messages": []}, 400),
        ("POST", "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user"}]}, 400),
        ("POST", "/v1/completions", b"x" * (9 << 20), 413),
        ("POST", "/v1/nothing", {}, 404),
        ("GET", "/v1/completions", None, 405),
        ("GET", "/nothing", None, 404),
    ],
    ids=lambda value: None if isinstance(value, bytes | dict) else str(value),
)
def test_what_cannot_be_served_is_answered(
    served: Served, method: str, path: str, body: object, status: int
) -> None:
    answer = served.call(method, path, body)
    assert answer[0] == status
    assert "message" in answer[1]["error"]
    assert served.call("GET", "/health")[0] == 200


def test_a_connection_is_used_again_and_garbage_ends_it_alone(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    for _ in range(3):
        connection.request("GET", "/health")
        assert connection.getresponse().read()
    connection.close()
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as raw:
        raw.sendall(b"what is this\r\n\r\n")
        assert b" 400 " in raw.recv(1000)
    assert served.call("GET", "/health")[0] == 200
