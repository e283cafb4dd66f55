"""HTTP/1.1 over asyncio streams: h11 knows the protocol, this file moves the bytes.

Promise: a request that breaks the protocol, is too large or too slow ends its connection alone, and
with an answer where one can still be given. One event loop; no state is shared between connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import h11

__all__ = ["Answer", "Handler", "HttpRequest", "Stream", "serve_connection"]

BODY_BYTES_MAX = 8 << 20
READ_BYTES = 1 << 16
#: A client that sends nothing for so long is gone.
IDLE_SECONDS_MAX = 75.0


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
    """Server-sent events, each sent when it is there. `ended` is called once, however it ends."""

    events: AsyncGenerator[str, None]
    ended: Callable[[], None]


Handler = Callable[[HttpRequest], Awaitable[Answer | Stream]]
T = TypeVar("T")


class _TooLarge(Exception):
    pass


async def serve_connection(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler
) -> None:
    """Answers requests on one connection until either side ends it."""
    wire = _Wire(reader, writer)
    try:
        while (request := await wire.request()) is not None:
            answer = await wire.unless_gone(handler(request))
            if isinstance(answer, Stream):
                await wire.stream(answer)
            else:
                await wire.answer(answer)
            if not wire.may_go_on():
                return
    except (h11.RemoteProtocolError, _TooLarge) as error:
        status = 413 if isinstance(error, _TooLarge) else 400
        with contextlib.suppress(h11.LocalProtocolError, OSError):
            await wire.answer(Answer(status=status, content={"error": {"message": str(error)}}))
    except (OSError, TimeoutError):
        pass  # the client is gone: nobody to tell
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class _Wire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=READ_BYTES)

    async def request(self) -> HttpRequest | None:
        """The next request, None when the client has ended the connection."""
        head: h11.Request | None = None
        body = bytearray()
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                if self._h11.they_are_waiting_for_100_continue:
                    self._send(h11.InformationalResponse(status_code=100, headers=[]))
                data = await asyncio.wait_for(self._reader.read(READ_BYTES), IDLE_SECONDS_MAX)
                self._h11.receive_data(data)
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > BODY_BYTES_MAX:
                    raise _TooLarge(f"a body of more than {BODY_BYTES_MAX} bytes")
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                return _request_of(head, bytes(body))
            else:
                return None

    async def answer(self, answer: Answer) -> None:
        is_text = isinstance(answer.content, str)
        body = (str(answer.content) if is_text else json.dumps(answer.content)).encode()
        kind = "text/plain; charset=utf-8" if is_text else "application/json"
        headers = {"content-type": kind, "content-length": str(len(body)), **answer.headers}
        self._send(h11.Response(status_code=answer.status, headers=list(headers.items())))
        self._send(h11.Data(data=body))
        self._send(h11.EndOfMessage())
        await self._writer.drain()

    async def stream(self, stream: Stream) -> None:
        """Sends events until there are no more. Raises ConnectionError when the client is gone."""
        headers = [("content-type", "text/event-stream"), ("cache-control", "no-cache")]
        try:
            self._send(h11.Response(status_code=200, headers=headers))
            async with contextlib.aclosing(stream.events) as events:
                while (event := await self.unless_gone(anext(events, None))) is not None:
                    self._send(h11.Data(data=f"data: {event}\n\n".encode()))
                    await self._writer.drain()
        finally:
            stream.ended()
        self._send(h11.EndOfMessage())
        await self._writer.drain()

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """Waits for `work`; gives it up, and raises ConnectionResetError, if the client goes."""
        working = asyncio.ensure_future(work)
        heard = asyncio.ensure_future(self._reader.read(READ_BYTES))
        try:
            await asyncio.wait({working, heard}, return_when=asyncio.FIRST_COMPLETED)
            if heard.done():
                if not heard.result():
                    raise ConnectionResetError("the client went away")
                self._h11.receive_data(heard.result())  # the next request, ahead of time
            return await working
        finally:
            for task in (working, heard):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await task

    def may_go_on(self) -> bool:
        """Readies the connection for the next request, if both sides want one."""
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        return True

    def _send(self, event: h11.Event) -> None:
        self._writer.write(self._h11.send(event) or b"")


def _request_of(head: h11.Request, body: bytes) -> HttpRequest:
    return HttpRequest(
        method=head.method.decode("ascii"),
        path=head.target.decode("ascii").partition("?")[0],
        headers={name.decode("ascii"): value.decode("latin-1") for name, value in head.headers},
        body=body,
    )
