"""OpenAI's request bodies, read field by field: what is not known or not served is said, by name.

Pure functions; any thread.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping, Set
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
#: Of one message. The template gets these, and no template here is given anything else: a turn
#: that called a tool, say, would be shown to the model as one that said nothing.
_MESSAGE = {"role", "content", "name"}
_MESSAGE_FIXED: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
}
_STREAM = {"include_usage"}
#: It pads what is sent, so that nobody who sees its length knows the tokens.
_STREAM_FIXED: dict[str, tuple[object, ...]] = {"include_obfuscation": (False,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body that was understood. `with_usage` wants usage at the end of a stream."""

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
        characters = sum(sum(map(len, one.values())) + 1 for one in messages)
        self._check_characters(characters, "messages")
        text = self.tokenizer.chat(messages)
        wants_logprobs = _one(read, "logprobs", bool, "true or false")
        count = _one(read, "top_logprobs", int, "a whole number")
        if count and not wants_logprobs:
            raise ArgumentInvalid(
                f"top_logprobs is {count} without logprobs",
                remedy="add logprobs: true, or leave it out",
                param="top_logprobs",
            )
        ids = self.tokenizer.encode(text, special=False)
        return self._asked(read, ids, (count or 0) if wants_logprobs else None, ("messages", None))

    def _object(self, body: bytes, own: set[str]) -> dict[str, Any]:
        read = read_object(body)
        model = _one(read, "model", str, "the name of a model")
        if model is None:
            raise _wrong("model", None, "the name of a model")
        if model != self.model:
            raise UnknownModel(f"no model {_shown(model)}", remedy=f"ask for {self.model!r}")
        _check_names(read, _COMMON | _IGNORED | own, _FIXED)
        return read

    def _asked(
        self,
        body: Mapping[str, Any],
        ids: list[int],
        logprobs: int | None,
        defaults: tuple[str, int | None],
    ) -> Asked:
        """`defaults`: the name of the prompt's field, and how many tokens if nobody says."""
        field, tokens_max = defaults
        is_stream = bool(_one(body, "stream", bool, "true or false"))
        with_usage = _with_usage(body, is_stream=is_stream)
        sampling = _sampling(body, logprobs, tokens_max)
        self._check_room(len(ids), sampling.max_tokens or 1, field)
        session = _session(_one(body, "user", str, "a text") or "")
        return Asked(
            request=Request(prompt=tuple(ids), sampling=sampling, session=session),
            is_stream=is_stream,
            with_usage=with_usage,
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


def _with_usage(body: Mapping[str, Any], *, is_stream: bool) -> bool:
    options = _one(body, "stream_options", dict, "an object") or {}
    _check_names(options, _STREAM, _STREAM_FIXED, "stream_options.")
    with_usage = bool(_one(options, "include_usage", bool, "true or false"))
    if options and not is_stream:
        raise ArgumentInvalid(
            f"stream_options is {_shown(options)} without stream",
            remedy="add stream: true, or leave it out",
            param="stream_options",
        )
    return with_usage


def _limit(body: Mapping[str, Any]) -> tuple[str, int | None]:
    """How many tokens at most, and the name under which that was said."""
    given = {
        name: value
        for name in ("max_completion_tokens", "max_tokens")
        if (value := _one(body, name, int, "a whole number")) is not None
    }
    if len(set(given.values())) > 1:
        both = " and ".join(f"{name} is {_shown(value)}" for name, value in given.items())
        raise ArgumentInvalid(both, remedy="send one of the two", param="max_tokens")
    return next(iter(given.items()), ("max_tokens", None))


def _sampling(body: Mapping[str, Any], logprobs: int | None, tokens_max: int | None) -> Sampling:
    number, whole = "a number", "a whole number"
    limit_name, limit = _limit(body)
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
        # Its messages begin with the name of the setting, which a body may call otherwise.
        setting, _, what = str(error).partition(" ")
        is_chat = body.get("messages") is not None
        named = {"max_tokens": limit_name, "logprobs": "top_logprobs" if is_chat else "logprobs"}
        name = named.get(setting, setting)
        param = name if name in body else None
        raise ArgumentInvalid(f"{name} {what}", remedy=error.remedy, param=param) from None


def _check_names(
    given: Mapping[str, Any],
    known: Set[str],
    fixed: Mapping[str, tuple[object, ...]],
    within: str = "",
) -> None:
    """Of a body, or of an object in it that is called `within`."""
    for name, value in given.items():
        if value is None:  # left out: some clients name all that they know
            continue
        full = within + name[:80]
        if name in fixed:
            if any(_is_same(value, allowed) for allowed in fixed[name]):
                continue
            said = f"{full} is {_shown(value)}, which this engine does not serve"
        elif name not in known:
            said = f"an argument nobody knows: {full}"
        else:
            continue
        raise ArgumentInvalid(said, remedy="leave it out", param=full.partition("[")[0])


def _is_same(given: object, allowed: object) -> bool:
    """Equal; but true is no number, and 1 is not true."""
    return given == allowed and isinstance(given, bool) == isinstance(allowed, bool)


def _message(index: int, message: Any) -> dict[str, Any]:
    """One message, for the template; content in parts is joined, as long as all of it is text."""
    name = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong(name, message, "an object with a role")
    _check_names(message, _MESSAGE, _MESSAGE_FIXED, f"{name}.")
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""  # it was cut off before it said anything
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) != len(content):
            raise _wrong(f"{name}.content", content, "text alone")
        content = "".join(texts)
    if not isinstance(content, str):
        raise _wrong(f"{name}.content", content, "a text")
    speaker = _one(message, "name", str, "a text", within=f"{name}.")
    named = {} if speaker is None else {"name": speaker}
    return {"role": message["role"], "content": content, **named}


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong("stop", given, "a text, or a list of texts")
    return tuple(stops)


def _one(body: Mapping[str, Any], name: str, kind: type, wanted: str, within: str = "") -> Any:
    """The value of a field, None where it is not there or null. Raises ArgumentInvalid."""
    value = body.get(name)
    kinds = (int, float) if kind is float else (kind,)
    if value is not None and type(value) not in kinds:
        raise _wrong(within + name, value, wanted)
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
