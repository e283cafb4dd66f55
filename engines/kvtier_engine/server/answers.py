"""What the engine said, in OpenAI's words: completions, chunks of a stream, usage and errors.

Pure functions; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from kvtier.errors import KvtierError
from kvtier_engine.errors import EngineClosed, InvalidRequest, KvTagMismatch, QueueFull
from kvtier_engine.model.tokens import Tokenizer
from kvtier_engine.schedule.request import Completion, Delta, TokenLogprob
from kvtier_engine.server.errors import ArgumentInvalid, ContextExceeded, UnknownModel
from kvtier_engine.server.http import RETRY_SECONDS, error_content, json_response

__all__ = ["DONE", "Wording", "error_event", "error_response", "usage_of"]

DONE = "[DONE]"
#: Error -> (status, OpenAI's type, code).
_ERRORS: dict[type[KvtierError], tuple[int, str, str]] = {
    ArgumentInvalid: (400, "invalid_request_error", "invalid_request"),
    ContextExceeded: (400, "invalid_request_error", "context_length_exceeded"),
    UnknownModel: (404, "invalid_request_error", "model_not_found"),
    InvalidRequest: (400, "invalid_request_error", "invalid_request"),
    QueueFull: (429, "rate_limit_error", "queue_full"),
    EngineClosed: (503, "server_error", "engine_closed"),
    KvTagMismatch: (500, "server_error", "kv_tag_mismatch"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """Of one request: its kind, its name and the model's tokens. `with_usage`: at the end of a
    stream its last chunk has the usage, and all others a null for it.
    """

    is_chat: bool
    with_usage: bool
    identifier: str
    created: int
    model: str
    tokenizer: Tokenizer

    def whole(self, done: Completion) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        if self.is_chat:
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": done.text}}
        else:
            choice = {"text": done.text}
        choice |= {
            "index": 0,
            "finish_reason": done.reason.value,
            "logprobs": self._logprobs(list(done.logprobs)),
        }
        return self._envelope("", [choice]) | {"usage": usage_of(done)}

    def opening(self) -> str | None:
        """The event before the first token: a chat says who speaks."""
        return self._chunk({"role": "assistant", "content": ""}, "", None) if self.is_chat else None

    def token(self, delta: Delta) -> str:
        logprobs = self._logprobs([delta.logprob] if delta.logprob else [])
        return self._chunk({"content": delta.text}, delta.text, logprobs)

    def ending(self, done: Completion) -> str:
        return self._chunk({}, "", None, reason=done.reason.value)

    def usage(self, done: Completion) -> str:
        return json.dumps(self._envelope("chunk", []) | {"usage": usage_of(done)})

    def _chunk(
        self, delta: Mapping[str, str], text: str, logprobs: Any, *, reason: str | None = None
    ) -> str:
        said = {"delta": delta} if self.is_chat else {"text": text}
        choice = {"index": 0, **said, "finish_reason": reason, "logprobs": logprobs}
        usage = {"usage": None} if self.with_usage else {}
        return json.dumps(self._envelope("chunk", [choice]) | usage)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "text_completion"
        if self.is_chat:
            name = "chat.completion.chunk" if kind else "chat.completion"
        return {
            "id": self.identifier,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any] | None:
        if not tokens:
            return None
        text, entry = self.tokenizer.token_text, self._entry
        if self.is_chat:
            return {
                "content": [
                    {
                        **entry(one.token, one.logprob),
                        "top_logprobs": [entry(token, value) for token, value in one.top],
                    }
                    for one in tokens
                ]
            }
        return {
            "tokens": [text(one.token) for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{text(t): value for t, value in one.top} for one in tokens],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {
            "token": self.tokenizer.token_text(token),
            "logprob": logprob,
            "bytes": None if data is None else list(data),
        }


def usage_of(done: Completion) -> dict[str, Any]:
    """Token counts; `cached_tokens` as OpenAI counts them, and beside it by tier."""
    cached = done.cached
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": len(done.tokens),
        "total_tokens": done.prompt_tokens + len(done.tokens),
        "prompt_tokens_details": {
            "cached_tokens": cached.total,
            "cached_tokens_by_tier": {
                "device": cached.device,
                "host": cached.host,
                "nvme": cached.nvme,
                "shared": cached.shared,
            },
        },
    }


def error_response(error: KvtierError) -> Response:
    status, content = _error(error)
    headers = {"retry-after": str(RETRY_SECONDS)} if status in (429, 503) else {}
    return json_response(content, status, headers)


def error_event(error: KvtierError) -> str:
    """An error in the middle of a stream, whose status has been sent long since."""
    return json.dumps(_error(error)[1])


def _error(error: KvtierError) -> tuple[int, dict[str, object]]:
    """Status and body."""
    status, kind, code = _ERRORS.get(type(error), (500, "server_error", "request_failed"))
    param = error.param if isinstance(error, ArgumentInvalid | ContextExceeded) else None
    return status, error_content(f"{error}; {error.remedy}", kind, code, param)
