"""What is in a body: read as OpenAI reads it, or refused by the name of the field."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvtier_engine.model.tokens import Tokenizer
from kvtier_engine.server.bodies import _COMMON, _FIXED, _IGNORED, Bodies
from kvtier_engine.server.errors import ArgumentInvalid, ContextExceeded
from tests.engine.engine_rig import engine_of, raw_tokenizer, tiny_model
from tests.engine.server_rig import Served, serve

LONE = "\ud800"
LONG = [{"role": "user", "content": "a" * 600}]


@pytest.fixture(scope="module")
def bodies() -> Bodies:
    return Bodies(model="tiny", tokenizer=tiny_model().tokenizer, room_tokens=512)


@pytest.fixture
def served() -> Iterator[Served]:
    yield from serve(engine_of(tiny_model()))


#: Body -> (what the message says, param, code).
BAD: dict[str, tuple[dict[str, object], str, str | None]] = {
    "temperature": ({"prompt": "a", "temperature": -1}, "temperature is -1", "temperature"),
    "text": ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'", "temperature"),
    "true": ({"prompt": "a", "temperature": True}, "temperature is True", "temperature"),
    "top_p": ({"prompt": "a", "top_p": 2}, "top_p is 2", "top_p"),
    "unknown": ({"prompt": "a", "colour": 1}, "an argument nobody knows: colour", "colour"),
    "n": ({"prompt": "a", "n": 2}, "n is 2, which this engine does not serve; leave it out", "n"),
    "n true": ({"prompt": "a", "n": True}, "n is True", "n"),
    "best_of": ({"prompt": "a", "best_of": True}, "best_of is True", "best_of"),
    "echo": ({"prompt": "a", "echo": 0}, "echo is 0", "echo"),
    "penalty": ({"prompt": "a", "presence_penalty": False}, "presence_penalty", "presence_penalty"),
    "usage": ({"prompt": "a", "stream_options": {"include_usage": 1}}, "is 1", "include_usage"),
    "no prompt": ({}, "prompt is None", "prompt"),
    "empty": ({"prompt": []}, "an empty prompt", None),
    "two": ({"prompt": ["a", "b"]}, "a list of 2 prompts, and this engine takes one", "prompt"),
    "lists": ({"prompt": [[1], [2], [3]]}, "a list of 3 prompts", "prompt"),
    "mixed": ({"prompt": [1, "b"]}, "a list of 2 prompts", "prompt"),
    "tools": ({"prompt": "a", "functions": [{}]}, "functions is [{}], which this", "functions"),
    "foreign": ({"prompt": [9999]}, "a token outside", None),
    "booleans": ({"prompt": [True, 5]}, "prompt is", "prompt"),
    "deep": ({"prompt": "a", "stop": json.loads("[" * 400 + "]" * 400)}, "stop is", "stop"),
    "tokens": ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0", "max_tokens"),
    "tokens true": ({"prompt": "a", "max_tokens": True}, "max_tokens is True", "max_tokens"),
    "stop": ({"prompt": "a", "stop": [1]}, "stop is", "stop"),
    "half a pair": ({"prompt": f"a{LONE}"}, "half of a surrogate pair", "prompt"),
    "in a user": ({"prompt": "a", "user": LONE}, "half of a surrogate pair", "user"),
    "in a stop": ({"prompt": "a", "stop": ["b", LONE]}, "half of a surrogate pair", "stop"),
    "in a name": ({"prompt": "a", LONE: 1}, "half of a surrogate pair", LONE),
    "no stream": (
        {"prompt": "a", "stream_options": {"include_usage": True}},
        "stream_options is {'include_usage': True} without stream; add stream: true",
        "stream_options",
    ),
    "in the options": (
        {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}},
        "an argument nobody knows: stream_options.continuous_usage_stats",
        "stream_options.continuous_usage_stats",
    ),
    "obfuscation": (
        {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation is True, which this engine does not serve",
        "stream_options.include_obfuscation",
    ),
    "two limits": (
        {"prompt": "a", "max_tokens": 5, "max_completion_tokens": 6},
        "max_completion_tokens is 6 and max_tokens is 5; send one of the two",
        "max_tokens",
    ),
    "the other limit": (
        {"prompt": "a", "max_completion_tokens": 0},
        "max_completion_tokens is 0",
        "max_completion_tokens",
    ),
    "stops": ({"prompt": "a", "stop": ["b" * 5000] * 5}, "stop is ('bbbb", "stop"),
}
#: The same of fields that a chat alone has; a message that is not served is one of them.
BAD_CHAT: dict[str, tuple[dict[str, object], str, str]] = {
    "no logprobs": ({"top_logprobs": 3}, "top_logprobs is 3 without logprobs", "top_logprobs"),
    "false": ({"logprobs": False, "top_logprobs": 3}, "without logprobs", "top_logprobs"),
    "many": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21", "top_logprobs"),
    "call": (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls is [{'id': '1'}], which this engine does not serve",
        "messages",
    ),
    "answer": (
        {"messages": [{"role": "tool", "content": "4", "tool_call_id": "1"}]},
        "messages[0].tool_call_id is '1', which this engine does not serve",
        "messages",
    ),
    "field": (
        {"messages": [{"role": "user", "content": "a", "colour": "red"}]},
        "an argument nobody knows: messages[0].colour",
        "messages",
    ),
    "name": (
        {"messages": [{"role": "user", "content": "a", "name": 1}]},
        "messages[0].name is 1",
        "messages",
    ),
    "long name": (
        {"messages": [{"role": "user", "content": "a", "name": "n" * 9000}]},
        "characters do not fit into 512 tokens",
        "messages",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(served: Served, name: str) -> None:
    body, said, param = BAD[name]
    status, content, _ = served.post("/v1/completions", **body)
    assert status == 400
    error = content["error"]
    assert said in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
    assert error["param"] == param
    assert len(error["message"]) < 300


@pytest.mark.parametrize("name", BAD_CHAT)
def test_bad_arguments_of_a_chat_are_named(bodies: Bodies, name: str) -> None:
    body, said, param = BAD_CHAT[name]
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], **body}
    with pytest.raises((ArgumentInvalid, ContextExceeded)) as caught:
        bodies.chat(json.dumps(asked).encode())
    assert said in str(caught.value) + "; " + caught.value.remedy
    assert caught.value.param == param


def test_a_message_as_clients_give_it_back_is_taken(bodies: Bodies) -> None:
    """`model_dump` of what OpenAI's client was answered has every field that it knows."""
    said = {
        "role": "assistant",
        "content": "b",
        "annotations": [],
        "audio": None,
        "function_call": None,
        "refusal": None,
        "tool_calls": None,
    }
    asked = {"model": "tiny", "messages": [said]}
    plain = {"model": "tiny", "messages": [{"role": "assistant", "content": "b"}]}
    read, wanted = (bodies.chat(json.dumps(body).encode()).request for body in (asked, plain))
    assert read.prompt == wanted.prompt


def test_who_speaks_is_for_the_template() -> None:
    template = "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(raw_tokenizer(), {"chat_template": template})
    bodies = Bodies(model="tiny", tokenizer=tokenizer, room_tokens=512)
    messages = [{"role": "user", "content": "a", "name": "ann"}, {"role": "user", "content": "b"}]
    body = json.dumps({"model": "tiny", "messages": messages}).encode()
    assert tokenizer.decode(bodies.chat(body).request.prompt) == "ann: auser: b"


def test_one_limit_under_both_names_is_one_limit(bodies: Bodies) -> None:
    limits = {"max_tokens": 7, "max_completion_tokens": 7}
    data = json.dumps({"model": "tiny", "prompt": "a", **limits}).encode()
    assert bodies.completion(data).request.sampling.max_tokens == 7


def test_a_message_with_half_a_pair_is_refused_and_a_whole_one_served(served: Served) -> None:
    for field in ("role", "content"):
        message = {"role": "user", "content": "b"} | {field: LONE}
        status, content, _ = served.post("/v1/chat/completions", messages=[message])
        assert (status, content["error"]["param"]) == (400, "messages")
    whole = [{"role": "user", "content": "\U0001f600"}]
    assert served.post("/v1/chat/completions", messages=whole, max_tokens=1)[0] == 200
    raw = b'{"model": "tiny", "prompt": "\xed\xa0\x80"}'  # half a pair, as UTF-8 forbids it
    assert served.call("POST", "/v1/completions", raw)[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a" * 600}, "prompt"),
        ("/v1/completions", {"prompt": "a" * 500, "max_tokens": 100}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 600}]},
            "messages",
        ),
    ],
    ids=["long", "together", "chat"],
)
def test_too_long_a_prompt_has_openais_code(
    served: Served, path: str, body: dict[str, object], param: str
) -> None:
    status, content, _ = served.post(path, **body)
    assert (status, content["error"]["code"]) == (400, "context_length_exceeded")
    assert "do not fit into 512" in content["error"]["message"]
    assert content["error"]["param"] == param


def test_a_completion_is_16_tokens_unless_it_says_otherwise(served: Served) -> None:
    def tokens(path: str, **body: object) -> int:
        status, content, _ = served.post(path, ignore_eos=True, **body)
        assert status == 200, content
        return int(content["usage"]["completion_tokens"])

    assert tokens("/v1/completions", prompt="abc") == 16
    assert tokens("/v1/completions", prompt="abc", max_tokens=20) == 20
    assert tokens("/v1/completions", prompt="a" * 508) == 4  # as many as there is room for
    message = {"role": "user", "content": "a" * 400}
    assert tokens("/v1/chat/completions", messages=[message]) > 16


def read(bodies: Bodies, **body: object) -> str:
    """The session of a completion."""
    data = json.dumps({"model": "tiny", "prompt": "a", **body}).encode()
    return bodies.completion(data).request.session


def test_a_user_is_the_session_and_a_long_one_its_hash(bodies: Bodies) -> None:
    assert read(bodies) == ""
    assert read(bodies, user="ann") == "ann"
    long = [read(bodies, user="\u00e9" * 33 + end) for end in ("a", "b")]
    assert long[0] != long[1]
    assert [len(session.encode()) for session in long] == [64, 64]


def test_numbers_that_json_does_not_have_are_refused(bodies: Bodies) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1" * 5000):
        body = f'{{"model": "tiny", "prompt": "a", "seed": {number}}}'
        with pytest.raises(ArgumentInvalid, match="no JSON"):
            bodies.completion(body.encode())


#: What clients send of what this engine does not have, or call the caller.
OTHERS = {
    "reasoning_effort": "low",
    "verbosity": "low",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
}


def test_null_is_as_left_out_and_what_names_the_caller_is_ignored(bodies: Bodies) -> None:
    names = _COMMON | _IGNORED | set(_FIXED)
    assert read(bodies, **dict.fromkeys(names - {"model"})) == ""
    assert set(OTHERS) <= _IGNORED
    assert read(bodies, **OTHERS) == ""
    for field in ("model", "prompt"):
        with pytest.raises(ArgumentInvalid, match=f"{field} is None"):
            read(bodies, **{field: None})


def test_an_assistant_that_said_nothing_is_taken(bodies: Bodies) -> None:
    def prompt(role: str, **content: object) -> tuple[int, ...]:
        messages = [{"role": role, **content}, {"role": "user", "content": "hi"}]
        return bodies.chat(
            json.dumps({"model": "tiny", "messages": messages}).encode()
        ).request.prompt

    assert prompt("assistant", content=None) == prompt("assistant", content="")
    assert prompt("assistant") == prompt("assistant", content="")
    with pytest.raises(ArgumentInvalid, match=r"messages\[0\].content is None"):
        prompt("user", content=None)


def test_fields_that_change_nothing_are_taken(bodies: Bodies) -> None:
    fields = {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "echo": False, "tools": []}
    assert read(bodies, **fields, store=True) == ""
