"""One HTTP/1.1 connection over asyncio streams: h11 knows the protocol, this file moves the bytes.

Promise: a request that breaks the protocol, is too large or too slow is refused with an answer
where one can still be given; nothing here waits for a client without a deadline. While a request
is worked on the client is watched, and a client that goes away is noticed. One event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import h11

from kvtier.errors import KvtierError
from kvtier_engine.server.http import Answer, HttpRequest, Refused, Stream
from kvtier_engine.server.limits import Limits

__all__ = ["Room", "Wire"]

log = logging.getLogger(__name__)

READ_BYTES = 1 << 16
#: Longer numbers are over any limit, and slow to read.
LENGTH_DIGITS_MAX = 18
T = TypeVar("T")


class Room:
    """How many bytes of bodies all connections of one loop hold together."""

    def __init__(self, nbytes_max: int) -> None:
        self._left = nbytes_max

    def take(self, nbytes: int) -> None:
        """Raises Refused (503) when there is no room."""
        if nbytes > self._left:
            raise Refused(503, "server_overloaded", "too many bytes of requests at once; wait")
        self._left -= nbytes

    def give_back(self, nbytes: int) -> None:
        self._left += nbytes


class Wire:
    """Owns the connection: `end` closes it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits, room: Room
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._room = room
        self._held = 0
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes_max)
        self._is_head = False
        self._gone: asyncio.Task[Exception] | None = None
        #: No request is read or answered now.
        self.is_idle = True
        #: The request that is answered now is the last one.
        self.is_last = False

    async def request(self) -> HttpRequest | None:
        """The next request, None when there is none in time. Raises Refused, OSError."""
        self.is_idle, self._is_head = True, False
        if not self._h11.trailing_data[0]:
            try:
                async with asyncio.timeout(self._limits.idle_seconds_max):
                    self._h11.receive_data(await self._reader.read(READ_BYTES))
            except TimeoutError:
                return None
        self.is_idle = False
        try:
            async with asyncio.timeout(self._limits.request_seconds_max):
                return await self._whole_request()
        except TimeoutError:
            raise Refused(408, "request_timeout", "the request took too long to come") from None
        except h11.RemoteProtocolError as error:
            # h11 knows more of them: 431 for a head that is too long, 501 for unknown codings.
            raise Refused(error.error_status_hint, "protocol_error", str(error)) from None

    async def _whole_request(self) -> HttpRequest | None:
        head: h11.Request | None = None
        body = bytearray()
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                if self._h11.they_are_waiting_for_100_continue:
                    self._send(h11.InformationalResponse(status_code=100, headers=[]))
                self._h11.receive_data(await self._reader.read(READ_BYTES))
            elif isinstance(event, h11.Request):
                head = event
                self._is_head = event.method == b"HEAD"
                self._check_length(event)
            elif isinstance(event, h11.Data):
                self._check_size(len(body) + len(event.data))
                self._room.take(len(event.data))
                self._held += len(event.data)
                body += event.data
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                return _request_of(head, bytes(body))
            else:
                return None

    def _check_length(self, head: h11.Request) -> None:
        """Before anything of the body has come, and before it is asked for by a 100."""
        for name, value in head.headers:
            if name == b"content-length":
                is_long = len(value) > LENGTH_DIGITS_MAX
                self._check_size(10**LENGTH_DIGITS_MAX if is_long else int(value))

    def _check_size(self, nbytes: int) -> None:
        limit = self._limits.body_bytes_max
        if nbytes > limit:
            raise Refused(413, "request_too_large", f"a body of more than {limit} bytes")

    async def answer(self, answer: Answer) -> None:
        is_text = isinstance(answer.content, str)
        body = (str(answer.content) if is_text else json.dumps(answer.content)).encode()
        kind = "text/plain; charset=utf-8" if is_text else "application/json"
        headers = {"content-type": kind, "content-length": str(len(body)), **answer.headers}
        if self.is_last:
            headers["connection"] = "close"
        self._send(h11.Response(status_code=answer.status, headers=list(headers.items())))
        if not self._is_head:
            self._send(h11.Data(data=body))
        self._send(h11.EndOfMessage())
        await self._drain()

    async def stream(self, stream: Stream) -> None:
        """Sends events until there are no more. Raises OSError when the client is gone."""
        headers = [("content-type", "text/event-stream"), ("cache-control", "no-cache")]
        try:
            self._send(h11.Response(status_code=200, headers=headers))
            async with contextlib.aclosing(stream.events) as events:
                while (event := await self.unless_gone(anext(events, None))) is not None:
                    self._send(h11.Data(data=f"data: {event}\n\n".encode()))
                    await self._drain()
        except Refused as refused:  # its status was sent long since
            self.is_last = True
            self._send(h11.Data(data=f"data: {json.dumps(refused.content)}\n\n".encode()))
        finally:
            stream.ended()
        self._send(h11.EndOfMessage())
        await self._drain()

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While this goes on `unless_gone` knows of a client that goes."""
        self._gone = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            self._gone.cancel()
            await asyncio.wait({self._gone})
            self._room.give_back(self._held)
            self._held = 0

    async def _watch(self) -> Exception:
        """Why the client need not be answered. What it sends is kept for the next request."""
        early = 0
        try:
            while data := await self._reader.read(READ_BYTES):
                early += len(data)
                if early > self._limits.early_bytes_max:
                    return Refused(400, "sent_ahead", "too much was sent ahead of the answer")
                self._h11.receive_data(data)
        except OSError as error:
            return error
        return ConnectionResetError("the client went away")

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """What `work` comes to. If the client goes, it is given up, and OSError or Refused raised;
        a stream that it came to at that moment is ended. An error that nobody foresaw is logged
        and becomes Refused (500).
        """
        assert self._gone is not None, "nobody watches the client"
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait({working, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if self._gone.done():
                raise self._gone.result()
        except BaseException:
            await _give_up(working)
            raise
        error = working.exception()
        if error is None or isinstance(error, KvtierError | Refused):
            return working.result()
        log.error("engine.request_broken", exc_info=error)
        raise Refused(500, "internal_error", "the server failed; its log says why")

    def may_go_on(self) -> bool:
        """Readies the connection for the next request, if both sides want one."""
        if self.is_last or {self._h11.our_state, self._h11.their_state} != {h11.DONE}:
            return False
        self._h11.start_next_cycle()
        return True

    async def refuse(self, refused: Refused) -> None:
        """Answers, if that is still possible, and lets the client go on sending for a while: a
        connection that is closed over unread bytes is reset, and the answer lost.
        """
        try:
            await self.answer(refused.answer)
        except h11.LocalProtocolError:  # in the middle of an answer
            return
        async with asyncio.timeout(self._limits.linger_seconds_max):
            self._writer.write_eof()
            left = self._limits.linger_bytes_max
            while left > 0 and (data := await self._reader.read(READ_BYTES)):
                left -= len(data)

    async def end(self) -> None:
        """Closes. What was not taken by then is dropped."""
        self._room.give_back(self._held)
        self._held = 0
        self._writer.close()
        try:
            async with asyncio.timeout(self._limits.linger_seconds_max):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            pass  # nobody to tell
        finally:
            self.abort()

    def abort(self) -> None:
        """Drops the connection now."""
        self._writer.transport.abort()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._limits.write_seconds_max):
                await self._writer.drain()
        except TimeoutError:
            self.abort()
            raise ConnectionAbortedError("the client does not read") from None

    def _send(self, event: h11.Event) -> None:
        self._writer.write(self._h11.send(event) or b"")


async def _give_up(working: asyncio.Future[T]) -> None:
    working.cancel()
    await asyncio.wait({working})
    if not working.cancelled() and working.exception() is None:
        came = working.result()
        if isinstance(came, Stream):
            came.ended()


def _request_of(head: h11.Request, body: bytes) -> HttpRequest:
    return HttpRequest(
        method=head.method.decode("ascii"),
        path=head.target.decode("ascii").partition("?")[0],
        headers={name.decode("ascii"): value.decode("latin-1") for name, value in head.headers},
        body=body,
    )
