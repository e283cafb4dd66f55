"""OpenAI's request bodies, read field by field: what is not known or not served is said, by name.

Pure functions; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_engine.errors import InvalidRequest
from kvtier_engine.model.tokens import Tokenizer
from kvtier_engine.schedule.request import Request, Sampling

__all__ = ["Asked", "read_chat", "read_completion", "read_object"]

#: Taken and of no effect: they steer what this engine does not have, or name the caller.
_IGNORED = {"metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key"}
#: Served at these values alone, which change nothing.
_FIXED: dict[str, tuple[object, ...]] = {
    "n": (1, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": (None, ""),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
}
_COMMON = {
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop",
    "logprobs", "stream", "stream_options", "user", "ignore_eos",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body that was understood. `with_usage` wants usage at the end of a stream."""

    model: str
    request: Request
    is_stream: bool
    with_usage: bool


def read_object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest unless `body` is a JSON object."""
    try:
        read = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is no JSON: {error}", remedy="send a JSON object") from None
    if not isinstance(read, dict):
        raise InvalidRequest("the body is no JSON object", remedy="send a JSON object")
    return read


def read_completion(body: Mapping[str, Any], tokenizer: Tokenizer) -> Asked:
    """/v1/completions. `prompt` is one text, or one list of token ids. Raises InvalidRequest."""
    _check_names(body, {"prompt"})
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        ids = prompt
    else:
        raise _wrong("prompt", prompt, "one text, or one list of token ids")
    logprobs = _one(body, "logprobs", int, "a whole number")
    return _asked(body, ids, logprobs)


def read_chat(body: Mapping[str, Any], tokenizer: Tokenizer) -> Asked:
    """/v1/chat/completions. Raises InvalidRequest."""
    _check_names(body, {"messages", "top_logprobs"})
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list of messages")
    text = tokenizer.chat([_message(index, message) for index, message in enumerate(messages)])
    wants_logprobs = _one(body, "logprobs", bool, "true or false")
    count = _one(body, "top_logprobs", int, "a whole number")
    return _asked(
        body, tokenizer.encode(text, special=False), (count or 0) if wants_logprobs else None
    )


def _asked(body: Mapping[str, Any], ids: list[int], logprobs: int | None) -> Asked:
    model = _one(body, "model", str, "the name of a model")
    if model is None:
        raise _wrong("model", None, "the name of a model")
    number = "a number"
    tokens = "a whole number"
    limit = _one(body, "max_completion_tokens", int, tokens)
    temperature = _one(body, "temperature", float, number)
    top_p = _one(body, "top_p", float, number)
    options = _one(body, "stream_options", dict, "an object") or {}
    sampling = Sampling(
        max_tokens=_one(body, "max_tokens", int, tokens) if limit is None else limit,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=_one(body, "top_k", int, tokens) or 0,
        seed=_one(body, "seed", int, tokens),
        stop=_stops(body.get("stop")),
        logprobs=logprobs,
        ignore_end=bool(_one(body, "ignore_eos", bool, "true or false")),
    )
    session = _one(body, "user", str, "a text") or ""
    return Asked(
        model=model,
        request=Request(prompt=tuple(ids), sampling=sampling, session=session[:64]),
        is_stream=bool(_one(body, "stream", bool, "true or false")),
        with_usage=bool(options.get("include_usage")),
    )


def _check_names(body: Mapping[str, Any], own: set[str]) -> None:
    for name in body:
        if name in _FIXED:
            if body[name] not in _FIXED[name]:
                raise _wrong(name, body[name], "leave it out: this engine does not serve it")
        elif name not in _COMMON | _IGNORED | own:
            raise InvalidRequest(f"an argument nobody knows: {name}", remedy="leave it out")


def _message(index: int, message: Any) -> dict[str, Any]:
    """One message; content in parts is joined, as long as all of it is text."""
    name = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong(name, message, "an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) != len(content):
            raise _wrong(f"{name}.content", content, "text alone")
        content = "".join(texts)
    if not isinstance(content, str):
        raise _wrong(f"{name}.content", content, "a text")
    return {"role": message["role"], "content": content}


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong("stop", given, "a text, or a list of texts")
    return tuple(stops)


def _one(body: Mapping[str, Any], name: str, kind: type, wanted: str) -> Any:
    """The value of a field, None where it is not there or null. Raises InvalidRequest."""
    value = body.get(name)
    kinds = (int, float) if kind is float else (kind,)
    if value is not None and type(value) not in kinds:
        raise _wrong(name, value, wanted)
    return value


def _wrong(name: str, value: object, wanted: str) -> InvalidRequest:
    shown = repr(value)
    shown = shown if len(shown) < 80 else f"{shown[:80]}..."
    return InvalidRequest(f"{name} is {shown}", remedy=f"pass {wanted}")
