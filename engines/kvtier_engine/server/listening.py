"""An ASGI application on a port, by uvicorn: how it begins, and how all of its connections end.

One event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from kvtier_engine.server.connection import connection_of
from kvtier_engine.server.limits import Limits

__all__ = ["listening"]

log = logging.getLogger(__name__)

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Leaves signals to those who run it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def listening(
    app: ASGIApp, limits: Limits, host: str, port: int, *, ending: Callable[[], None] | None = None
) -> AsyncIterator[tuple[str, int]]:
    """Serves on host:port (0: any free one), and says where. At the end `ending` is called, nobody
    is let in, those who are answered get their time, the others are dropped, and nothing is left.
    Raises OSError.
    """
    listener = _listener(host, port)
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
        h11_max_incomplete_event_size=limits.head_bytes_max,
    )
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    address = listener.getsockname()
    try:
        yield address[0], address[1]
    finally:
        if ending is not None:
            ending()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=limits.shutdown_seconds_max)
        if not serving.done():
            _drop(server.server_state)
        await serving


def _listener(host: str, port: int) -> socket.socket:
    """Takes connections from now on; they wait for the server. Raises OSError."""
    kind, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(address[:2], family=kind, backlog=_BACKLOG)


def _drop(state: uvicorn.server.ServerState) -> None:
    """What has not ended in its time. The requests end as they do when a client goes."""
    left = list(state.connections)
    if left:
        log.warning("engine.connections_dropped count=%d", len(left))
    for connection in left:
        connection.transport.abort()
