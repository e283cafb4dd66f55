"""The body of a request: read within bounds of bytes and time. One event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from kvtier_engine.server.http import Refused
from kvtier_engine.server.limits import Limits

__all__ = ["BodyReader"]


class BodyReader:
    """Of one server: knows how many bytes of bodies all its requests hold together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._left = limits.bodies_bytes_max

    @contextlib.asynccontextmanager
    async def hold(self, request: Request) -> AsyncIterator[Held]:
        """Reads; the bytes count until the end of the block, or where they are kept, until
        `give_back`. Raises Refused, ClientDisconnect.
        """
        held = Held(self)
        try:
            await self._fill(held, request)
            yield held
        finally:
            if not held.is_kept:
                held.give_back()

    async def _fill(self, held: Held, request: Request) -> None:
        is_unread = True
        try:
            self._check_length(request)
            async with asyncio.timeout(self._limits.request_seconds_max):
                while is_unread:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    is_unread = message.get("more_body", False)
                    self._add(held, message.get("body", b""))
        except TimeoutError:
            raise Refused(408, "request_timeout", "the request took too long to come") from None
        except Refused as refused:
            refused.is_unread = is_unread
            raise

    def give_back(self, nbytes: int) -> None:
        self._left += nbytes

    def _add(self, held: Held, data: bytes) -> None:
        self._check_size(len(held.body) + len(data))
        if len(data) > self._left:
            raise Refused(503, "server_overloaded", "too many bytes of requests at once; wait")
        self._left -= len(data)
        held.body += data

    def _check_length(self, request: Request) -> None:
        """Before anything of the body has come, and before it is asked for by a 100."""
        length = request.headers.get("content-length", "0")
        if length.isdecimal():  # the protocol has let no other length through
            self._check_size(int(length))

    def _check_size(self, nbytes: int) -> None:
        limit = self._limits.body_bytes_max
        if nbytes > limit:
            raise Refused(413, "request_too_large", f"a body of more than {limit} bytes")


class Held:
    """A body, and its bytes in the account of the reader until they are given back."""

    def __init__(self, reader: BodyReader) -> None:
        self._reader = reader
        self._is_given_back = False
        self.body = bytearray()
        #: Somebody else calls `give_back`.
        self.is_kept = False

    def give_back(self) -> None:
        """Twice is no error."""
        if not self._is_given_back:
            self._is_given_back = True
            self._reader.give_back(len(self.body))
