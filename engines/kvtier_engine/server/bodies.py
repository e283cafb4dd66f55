"""OpenAI's request bodies, read field by field: what is not known or not served is said, by name.

Pure functions; any thread.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_engine.errors import InvalidRequest
from kvtier_engine.model.tokens import Tokenizer
from kvtier_engine.schedule.request import Request, Sampling
from kvtier_engine.server.errors import ArgumentInvalid, ContextExceeded, UnknownModel

__all__ = ["Asked", "Bodies", "read_object"]

#: OpenAI's, for completions that do not say how many.
COMPLETION_TOKENS = 16
CHARACTERS_PER_TOKEN_MAX = 16
SESSION_BYTES_MAX = 64

#: Taken and of no effect: they steer what this engine does not have, or name the caller.
_IGNORED = {
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
    "reasoning_effort", "safety_identifier", "service_tier", "store", "verbosity",
}  # fmt: skip
#: Served at these values alone, which change nothing; null is as left out.
_FIXED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bodies:
    """Reads the bodies for one model, which clients call `model`. `room_tokens` is what a prompt
    and its answer may have together.

    Raises ArgumentInvalid, ContextExceeded, UnknownModel, InvalidRequest. The cheap checks come
    first: a text that is surely too long is not made to tokens.
    """

    model: str
    tokenizer: Tokenizer
    room_tokens: int

    def completion(self, body: bytes) -> Asked:
        """/v1/completions. `prompt` is one text, or one list of token ids."""
        read = self._object(body, {"prompt"})
        prompt = read.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt):
            raise ArgumentInvalid(
                f"prompt is a list of {len(prompt)} prompts, and this engine takes one a request",
                remedy="send a request for each, at the same time",
                param="prompt",
            )
        if isinstance(prompt, str):
            self._check_characters(len(prompt), "prompt")
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, list):
            self._check_room(len(prompt), 1, "prompt")
            if not all(type(token) is int for token in prompt):
                raise _wrong("prompt", prompt, "one text, or one list of token ids")
            ids = prompt
        else:
            raise _wrong("prompt", prompt, "one text, or one list of token ids")
        logprobs = _one(read, "logprobs", int, "a whole number")
        rest = max(1, self.room_tokens - len(ids))
        return self._asked(read, ids, logprobs, ("prompt", min(COMPLETION_TOKENS, rest)))

    def chat(self, body: bytes) -> Asked:
        """/v1/chat/completions."""
        read = self._object(body, {"messages", "top_logprobs"})
        given = read.get("messages")
        if not isinstance(given, list) or not given:
            raise _wrong("messages", given, "a list of messages")
        messages = [_message(index, message) for index, message in enumerate(given)]
        characters = sum(len(one["role"]) + len(one["content"]) + 1 for one in messages)
        self._check_characters(characters, "messages")
        text = self.tokenizer.chat(messages)
        wants_logprobs = _one(read, "logprobs", bool, "true or false")
        count = _one(read, "top_logprobs", int, "a whole number")
        ids = self.tokenizer.encode(text, special=False)
        return self._asked(read, ids, (count or 0) if wants_logprobs else None, ("messages", None))

    def _object(self, body: bytes, own: set[str]) -> dict[str, Any]:
        read = read_object(body)
        model = _one(read, "model", str, "the name of a model")
        if model is None:
            raise _wrong("model", None, "the name of a model")
        if model != self.model:
            raise UnknownModel(f"no model {_shown(model)}", remedy=f"ask for {self.model!r}")
        _check_names(read, own)
        return read

    def _asked(
        self,
        body: Mapping[str, Any],
        ids: list[int],
        logprobs: int | None,
        defaults: tuple[str, int | None],
    ) -> Asked:
        """`defaults`: the name of the prompt's field, and how many tokens if nobody says."""
        options = _one(body, "stream_options", dict, "an object") or {}
        field, tokens_max = defaults
        sampling = _sampling(body, logprobs, tokens_max)
        self._check_room(len(ids), sampling.max_tokens or 1, field)
        session = _session(_one(body, "user", str, "a text") or "")
        return Asked(
            model=self.model,
            request=Request(prompt=tuple(ids), sampling=sampling, session=session),
            is_stream=bool(_one(body, "stream", bool, "true or false")),
            with_usage=bool(_one(options, "include_usage", bool, "true or false")),
        )

    def _check_characters(self, count: int, param: str) -> None:
        """Nothing that people write has so many characters a token."""
        limit = CHARACTERS_PER_TOKEN_MAX * self.room_tokens
        if count > limit:
            raise _too_long(f"{count} characters do not fit into {self.room_tokens} tokens", param)

    def _check_room(self, prompt: int, wanted: int, param: str) -> None:
        if prompt + wanted > self.room_tokens:
            raise _too_long(
                f"{prompt} prompt tokens and {wanted} more do not fit into {self.room_tokens}",
                param,
            )


def read_object(body: bytes) -> dict[str, Any]:
    """Raises ArgumentInvalid unless `body` is a JSON object whose texts are Unicode texts."""
    try:
        read = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArgumentInvalid(
            f"the body is no JSON: {error}", remedy="send a JSON object in UTF-8"
        ) from None
    if not isinstance(read, dict):
        raise ArgumentInvalid("the body is no JSON object", remedy="send a JSON object")
    if b"\\u" in body:  # only so can half of a pair come through UTF-8
        for name, value in read.items():
            _check_text(name, value)
    return read


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_text(name: str, value: object) -> None:
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise ArgumentInvalid(
            f"{_shown(name)} has a text with half of a surrogate pair, which is no character",
            remedy="send whole characters",
            param=name,
        ) from None


def _session(user: str) -> str:
    """The user as a session's name: itself, or its hash where it is longer than kvtier takes."""
    data = user.encode()
    return user if len(data) <= SESSION_BYTES_MAX else hashlib.sha256(data).hexdigest()


def _sampling(body: Mapping[str, Any], logprobs: int | None, tokens_max: int | None) -> Sampling:
    number, whole = "a number", "a whole number"
    limit = _one(body, "max_completion_tokens", int, whole)
    if limit is None:
        limit = _one(body, "max_tokens", int, whole)
    temperature = _one(body, "temperature", float, number)
    top_p = _one(body, "top_p", float, number)
    top_k = _one(body, "top_k", int, whole) or 0
    seed = _one(body, "seed", int, whole)
    stop = _stops(body.get("stop"))
    ignore_end = bool(_one(body, "ignore_eos", bool, "true or false"))
    try:
        return Sampling(
            max_tokens=tokens_max if limit is None else limit,
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=top_k,
            seed=seed,
            stop=stop,
            logprobs=logprobs,
            ignore_end=ignore_end,
        )
    except InvalidRequest as error:
        # Its messages begin with the name of the field.
        name = str(error).partition(" ")[0]
        param = name if name in body else None
        raise ArgumentInvalid(str(error), remedy=error.remedy, param=param) from None


def _check_names(body: Mapping[str, Any], own: set[str]) -> None:
    for name, given in body.items():
        if given is None:  # left out: some clients name all that they know
            continue
        if name in _FIXED:
            if not any(_is_same(given, value) for value in _FIXED[name]):
                raise ArgumentInvalid(
                    f"{name} is {_shown(given)}, which this engine does not serve",
                    remedy="leave it out",
                    param=name,
                )
        elif name not in _COMMON | _IGNORED | own:
            raise ArgumentInvalid(
                f"an argument nobody knows: {name[:80]}", remedy="leave it out", param=name[:80]
            )


def _is_same(given: object, allowed: object) -> bool:
    """Equal; but true is no number, and 1 is not true."""
    return given == allowed and isinstance(given, bool) == isinstance(allowed, bool)


def _message(index: int, message: Any) -> dict[str, Any]:
    """One message; content in parts is joined, as long as all of it is text."""
    name = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong(name, message, "an object with a role")
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""  # it called tools, or was cut off before it said anything
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


def _wrong(name: str, value: object, wanted: str) -> ArgumentInvalid:
    param = name.partition("[")[0]
    return ArgumentInvalid(f"{name} is {_shown(value)}", remedy=f"pass {wanted}", param=param)


def _too_long(message: str, param: str) -> ContextExceeded:
    return ContextExceeded(
        message, remedy="send a shorter prompt, or ask for fewer tokens", param=param
    )


def _shown(value: object) -> str:
    """The beginning of a value, whatever its size and depth."""
    return reprlib.repr(value)[:80]
