"""One gRPC channel, opened by the first call, and what is around every call: its timeout, and its
errors as those of kvtier.

Belongs to the event loop of its first call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio

from kvtier.errors import ClientClosed, DaemonUnavailable, DeadlineExceeded
from kvtier.transfer import rpc
from kvtier.transfer.grpc_status import from_rpc_error
from kvtier.transfer.planes.address import grpc_target
from kvtier.transfer.planes.deadline import Deadline

__all__ = ["GrpcChannel", "parsed"]

#: How long after a call's timeout grpc may take to say so.
_GRACE_S: Final = 0.02

_CLOSED_REMEDY: Final = "connect again"


class GrpcChannel:
    """`url` is unix:///path or grpc://host:port. Raises InvalidConfigValue, NotImplementedYet."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._target = grpc_target(url)
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callables: dict[str, Any] = {}
        self._is_closed = False
        self._is_runtime_kept = False

    async def unary(self, service: str, name: str, request: Any, deadline: Deadline) -> Any:
        """The answer of a call with one request and one answer."""
        async with self.until(deadline) as seconds:
            return parsed(await self.callable(service, name)(request, timeout=seconds))

    async def close(self) -> None:
        """Calls under way end with ClientClosed."""
        self._is_closed = True
        channel, self._channel = self._channel, None
        self._callables.clear()
        if channel is not None:
            await channel.close()

    def callable(self, service: str, name: str) -> Any:
        """grpc's own callable of an rpc; see rpc.multicallable."""
        if self._is_closed:
            raise ClientClosed(f"the connection to {self._url} is closed", remedy=_CLOSED_REMEDY)
        loop = asyncio.get_running_loop()
        if self._channel is None:
            self._loop = loop
            self._channel = grpc.aio.insecure_channel(
                self._target, options=list(rpc.CHANNEL_OPTIONS)
            )
        elif loop is not self._loop:
            raise ClientClosed(
                f"the connection to {self._url} belongs to another event loop",
                remedy="connect once in each event loop",
            )
        method = rpc.METHODS[service][name]
        made = self._callables.get(method.path)
        if made is None:
            made = self._callables[method.path] = rpc.multicallable(self._channel, method)
        return made

    @asynccontextmanager
    async def until(self, deadline: Deadline) -> AsyncIterator[float]:
        """Around a call: gives its timeout, and turns what grpc raises into errors of ours."""
        seconds = deadline.remaining()
        try:
            # grpc ends a call at its timeout, but for a write into a socket that nobody reads any
            # more: that one waits for the socket.
            async with asyncio.timeout(seconds + _GRACE_S):
                yield seconds
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except grpc.aio.InternalError as error:
            raise DaemonUnavailable(
                f"the call to {self._url} broke off: {error}",
                remedy="see whether the daemon was stopped or killed; call again",
            ) from error
        except grpc.aio.UsageError as error:
            raise self._ended(str(error)) from error
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            self._keep_runtime()
            raise DeadlineExceeded(
                f"the daemon at {self._url} does not take what is sent",
                remedy="see whether it is stopped; compute the pages meanwhile",
            ) from None
        except asyncio.CancelledError:
            # Closing the channel cancels its calls; that is not the caller's task being cancelled.
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise self._ended("closed during the call") from None
            raise

    def _keep_runtime(self) -> None:
        """grpc.aio stops its own thread with the last channel, and waits in the event loop until no
        write is stuck: until the daemon goes on, or keepalive gives it up. Rather keep the thread.
        """
        if not self._is_runtime_kept:
            self._is_runtime_kept = True
            grpc.aio.init_grpc_aio()

    def _ended(self, why: str) -> ClientClosed:
        return ClientClosed(f"the connection to {self._url}: {why}", remedy=_CLOSED_REMEDY)


def parsed(message: Any) -> Any:
    """grpc gives None for an answer that its deserializer refused."""
    if message is None or message is grpc.aio.EOF:
        raise DaemonUnavailable(
            "the answer of the daemon could not be read",
            remedy="use a client and daemon of the same version",
        )
    return message
