"""What the routes answer with: JSON, a stream of events, a refusal. One event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvtier_engine.server.limits import Limits

__all__ = [
    "RETRY_SECONDS",
    "Refusal",
    "Refused",
    "Stream",
    "error_content",
    "json_response",
    "unless_gone",
]

log = logging.getLogger(__name__)

RETRY_SECONDS = 1
T = TypeVar("T")


def error_content(
    message: str, kind: str, code: str, param: str | None = None
) -> dict[str, object]:
    """The body of an error, as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """In ASCII, so that no text can fail to be sent."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


class Refused(Exception):
    """What the server does not take, whatever the engine would say. 429 and 503 say when to come
    again.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        #: The rest of the body may come still.
        self.is_unread = True

    @property
    def content(self) -> dict[str, object]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return error_content(str(self), kind, self.code)

    @property
    def headers(self) -> dict[str, str]:
        headers = {"connection": "close"}
        if self.status in (429, 503):
            headers["retry-after"] = str(RETRY_SECONDS)
        return headers


class Refusal(Response):
    """The last answer of a connection. A client whose body was not read to its end may go on
    sending for a while: it would not see the answer if it were reset while it sends.
    """

    def __init__(self, refused: Refused, limits: Limits) -> None:
        content = json.dumps(refused.content)
        super().__init__(content, refused.status, refused.headers, media_type="application/json")
        self._limits = limits
        self._is_unread = refused.is_unread

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        left = self._limits.linger_bytes_max if self._is_unread else 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.linger_seconds_max):
                while left > 0 and (message := await receive()).get("more_body"):
                    left -= len(message.get("body", b""))
        await send({"type": "http.response.body", "body": b""})


class Stream(StreamingResponse):
    """Server-sent events, each sent when it is there. `ended` is called once, however it ends,
    also when nothing was sent. An error that nobody foresaw is logged, and is the last event.
    """

    def __init__(self, events: AsyncGenerator[str, None], ended: Callable[[], None]) -> None:
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
        super().__init__(self._sent(events), headers=headers)
        self._events = events
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()
            await self._events.aclose()

    async def _sent(self, events: AsyncGenerator[str, None]) -> AsyncIterator[str]:
        while True:
            coming = asyncio.ensure_future(anext(events, None))
            try:
                await asyncio.wait({coming})
            finally:
                await _given_up(coming)
            if (error := coming.exception()) is not None:
                log.error("engine.request_broken", exc_info=error)
                refused = Refused(500, "internal_error", "the server failed; its log says why")
                yield f"data: {json.dumps(refused.content)}\n\n"
                return
            if (event := coming.result()) is None:
                return
            yield f"data: {event}\n\n"


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` comes to. When the client goes it is given up: raises ClientDisconnect. The body
    must have been read.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        await _given_up(working)
        await _given_up(gone)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _given_up(task: asyncio.Future[T]) -> None:
    """Ends it, if it has not ended."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
