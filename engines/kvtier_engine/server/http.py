"""What goes between the wire and the routes: requests, answers, streams, refusals. Values."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Answer", "Handler", "HttpRequest", "Refused", "Stream", "error_content"]

RETRY_SECONDS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer. `content` is sent as JSON unless it is text."""

    status: int = 200
    content: object
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Server-sent events, each sent when it is there. `ended` is called once, however it ends,
    also when nothing was sent.
    """

    events: AsyncGenerator[str, None]
    ended: Callable[[], None]


Handler = Callable[[HttpRequest], Awaitable[Answer | Stream]]


class Refused(Exception):
    """The connection ends with this answer. 429 and 503 say when to come again."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def content(self) -> dict[str, object]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return error_content(str(self), kind, self.code)

    @property
    def answer(self) -> Answer:
        headers = {"connection": "close"}
        if self.status in (429, 503):
            headers["retry-after"] = str(RETRY_SECONDS)
        return Answer(status=self.status, content=self.content, headers=headers)


def error_content(
    message: str, kind: str, code: str, param: str | None = None
) -> dict[str, object]:
    """The body of an error, as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
