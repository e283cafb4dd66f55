"""An ASGI application on sockets, by uvicorn: how it begins, and how all of its connections end.

One event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import uvicorn
from starlette.types import ASGIApp

from kvtier_engine.server.connection import connection_of
from kvtier_engine.server.errors import AddressUnusable, ServerEnded
from kvtier_engine.server.limits import Limits
from kvtier_engine.server.listener import ACCEPTED_MAX, BACKLOG

__all__ = ["listening"]

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Leaves signals to those who run it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio has one number for how many may wait and how many it accepts in one turn: it was
        # given the second.
        for one in sockets or ():
            one.listen(BACKLOG)


@contextlib.asynccontextmanager
async def listening(
    app: ASGIApp,
    limits: Limits,
    sockets: Sequence[socket.socket],
    *,
    ending: Callable[[], None] | None = None,
) -> AsyncIterator[list[tuple[str, int]]]:
    """Serves on these sockets (`listener.bound`), which are closed at the end, and says where. At
    the end `ending` is called, nobody is let in, those who are answered get their time, the others
    are dropped, and nothing is left. Raises AddressUnusable, UvicornUnsuitable, and ServerEnded in
    the middle of the block, which is cancelled, when uvicorn ends by itself.
    """
    with contextlib.ExitStack() as stack:
        for one in sockets:
            stack.enter_context(one)
        addresses = [one.getsockname()[:2] for one in sockets]
        _listen(sockets)
        config = uvicorn.Config(
            app,
            http=connection_of(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=ACCEPTED_MAX,
            h11_max_incomplete_event_size=limits.head_bytes_max,
        )
        server = _Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=list(sockets)))
        try:
            async with _while_it_runs(serving):
                yield addresses
        finally:
            if ending is not None:
                ending()
            server.should_exit = True
            await asyncio.wait({serving}, timeout=limits.shutdown_seconds_max)
            if not serving.done():
                _drop(server.server_state)
            await asyncio.wait({serving})
            if not serving.cancelled() and (error := serving.exception()) is not None:
                log.error("engine.server_ended", exc_info=error)


def _listen(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        try:
            one.listen(BACKLOG)
        except OSError as error:  # somebody else was bound there, and listened first
            raise AddressUnusable(
                f"--port {one.getsockname()[1]}: {error.strerror}",
                remedy="pass another --port, or 0",
            ) from error


@contextlib.asynccontextmanager
async def _while_it_runs(serving: asyncio.Future[None]) -> AsyncIterator[None]:
    """Cancels the block when the server ends before it: raises ServerEnded then."""
    block = asyncio.current_task()
    assert block is not None, "called in a task"
    is_ended = False

    def end(_: object) -> None:
        nonlocal is_ended
        is_ended = True
        block.cancel()

    serving.add_done_callback(end)
    try:
        yield
    except asyncio.CancelledError:
        # Somebody else may have cancelled it as well: that goes on.
        if not is_ended or block.uncancel() > 0:
            raise
        raise ServerEnded(
            "the HTTP server ended by itself", remedy="see the log, and start it again"
        ) from None
    finally:
        serving.remove_done_callback(end)


def _drop(state: uvicorn.server.ServerState) -> None:
    """What has not ended in its time. The requests end as they do when a client goes."""
    left = list(state.connections)
    if left:
        log.warning("engine.connections_dropped count=%d", len(left))
    for connection in left:
        connection.transport.abort()
