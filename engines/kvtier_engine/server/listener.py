"""The connections of one server: how many there may be, and how each of them and all of them end.

Promise: what goes wrong on one connection ends it alone; `close` is done within its limits, and
nothing of the listener runs afterwards. One event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from kvtier_engine.server.http import Handler, Refused, Stream
from kvtier_engine.server.limits import Limits
from kvtier_engine.server.wire import Room, Wire

__all__ = ["Listener"]

log = logging.getLogger(__name__)


class Listener:
    """Made in the loop that it serves in. `start` once, `close` once."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        self._handler = handler
        self._limits = limits
        self._room = Room(limits.bodies_bytes_max)
        self._wires: dict[asyncio.Task[None], Wire] = {}
        self._server: asyncio.Server | None = None
        self._is_closing = False

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listens on host:port (0: any free one); where it does. Raises OSError."""
        self._server = await asyncio.start_server(self._accept, host, port)
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    def stop_accepting(self) -> None:
        """The requests that are answered now are the last ones."""
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        for task, wire in self._wires.items():
            wire.is_last = True
            if wire.is_idle:
                task.cancel()

    async def close(self) -> None:
        """Gives those who are answered their time, then drops them."""
        self.stop_accepting()
        if self._wires:
            await asyncio.wait(self._wires, timeout=self._limits.shutdown_seconds_max)
        left = dict(self._wires)
        for task, wire in left.items():
            wire.abort()
            task.cancel()
        if left:
            log.warning("engine.connections_dropped count=%d", len(left))
            await asyncio.wait(left)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A plain function with tasks of its own: those that asyncio makes here cannot be awaited,
        # and complain when they are cancelled.
        many = self._limits.connections_max
        if self._is_closing or len(self._wires) >= 2 * many:
            writer.transport.abort()
            return
        wire = Wire(reader, writer, self._limits, self._room)
        serving = self._serve(wire, refused=len(self._wires) >= many)
        task = asyncio.get_running_loop().create_task(serving)
        self._wires[task] = wire
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        wire = self._wires.pop(task)
        if task.cancelled():
            wire.abort()  # it may have ended before it began
        elif (error := task.exception()) is not None:
            log.error("engine.connection_broken", exc_info=error)

    async def _serve(self, wire: Wire, *, refused: bool) -> None:
        try:
            if refused:
                wire.is_idle = False
                raise Refused(503, "server_overloaded", "too many connections; wait")
            await self._converse(wire)
        except Refused as error:
            # The client may be gone, or not come to an end: nobody to tell.
            with contextlib.suppress(OSError, TimeoutError):
                await wire.refuse(error)
        except OSError:
            pass  # the client is gone: nobody to tell
        finally:
            await wire.end()

    async def _converse(self, wire: Wire) -> None:
        """Answers requests until either side ends the connection. Raises Refused, OSError."""
        while (request := await wire.request()) is not None:
            async with wire.watched():
                said = await wire.unless_gone(self._handler(request))
                if isinstance(said, Stream):
                    await wire.stream(said)
            if not isinstance(said, Stream):
                await wire.answer(said)
            if not wire.may_go_on():
                return
