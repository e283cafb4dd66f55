"""The plane over gRPC: any host, any language, bulk bytes in streams.

Promise: every call ends by its deadline, also when the daemon is stopped or gone; a call that fails
raises the KvtierError that the daemon raised, or DaemonUnavailable or DeadlineExceeded. The channel
is opened by the first call and reconnects by itself (rpc.CHANNEL_OPTIONS); no call is repeated
here.

Memory: each message is one `bytes`. glibc takes large blocks from the kernel and gives them back
until it has seen a few freed; a process that moves much may set MALLOC_MMAP_THRESHOLD_=1073741824
and MALLOC_TRIM_THRESHOLD_=8589934592 in its environment, which about doubled unary calls where it
was measured.

Belongs to the event loop of its first call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import grpc
import grpc.aio

from kvtier.errors import ClientClosed, DaemonUnavailable, DeadlineExceeded
from kvtier.transfer import rpc
from kvtier.transfer.grpc_status import from_rpc_error
from kvtier.transfer.messages import layout_to_proto, shard_to_proto
from kvtier.transfer.planes.address import grpc_target
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.grpc_values import capabilities_from_proto, status_from_proto
from kvtier.transfer.planes.streams import GetRun, PutRun
from kvtier.transfer.planes.values import (
    Capabilities,
    GetQuery,
    Hints,
    LookupReply,
    NamespaceRequest,
    OpenedNamespace,
    OutgoingPage,
    PageSink,
    PinReply,
    PutOpening,
    PutReply,
    Status,
)
from kvtier.v1 import admin_pb2, pages_pb2, transfer_pb2

__all__ = ["GrpcPlane"]

#: How long after a call's timeout grpc may take to say so.
_GRACE_S: Final = 0.02

_CLOSED_REMEDY: Final = "connect again"


class _LostStatus(Exception):
    """A put ended early and nobody can say with what."""


class GrpcPlane:
    """`url` is unix:///path or grpc://host:port. Raises InvalidConfigValue, NotImplementedYet."""

    name: Final = "grpc"

    def __init__(self, url: str) -> None:
        self._url = url
        self._target = grpc_target(url)
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callables: dict[str, Any] = {}
        self._is_closed = False
        self._is_runtime_kept = False

    async def open_namespace(
        self, request: NamespaceRequest, deadline: Deadline
    ) -> OpenedNamespace:
        answer = await self._pages(
            "OpenNamespace",
            pages_pb2.OpenNamespaceRequest(
                session_id=request.session_id,
                tenant=request.tenant,
                salt=request.salt,
                layout=layout_to_proto(request.layout),
                shard=shard_to_proto(request.layout.shard),
                client_name=request.client_name,
                fingerprint=request.fingerprint,
            ),
            deadline,
        )
        return OpenedNamespace(
            session_id=answer.session_id,
            handle=answer.handle,
            boot_id=answer.boot_id,
            fingerprint=answer.fingerprint,
            generation=answer.generation,
            raw_bytes=answer.raw_bytes,
            fp8_bytes=answer.fp8_bytes,
        )

    async def close_session(self, session_id: int, deadline: Deadline) -> None:
        request = pages_pb2.CloseSessionRequest(session_id=session_id)
        await self._pages("CloseSession", request, deadline)

    async def lookup(
        self, handle: int, keys: Sequence[bytes], hints: Hints, deadline: Deadline
    ) -> LookupReply:
        request = pages_pb2.LookupRequest(
            handle=handle,
            keys=b"".join(keys),
            hints=pages_pb2.CallHints(
                session=hints.session,
                ttl_ms=hints.ttl_ms,
                priority=hints.priority,
                traceparent=hints.traceparent,
            ),
        )
        answer = await self._pages("Lookup", request, deadline)
        codes = _codes(answer.codes, len(keys))
        return LookupReply(codes, _codes(answer.tiers, len(keys)))

    async def get(self, query: GetQuery, sink: PageSink, deadline: Deadline) -> None:
        request = transfer_pb2.GetRequest(
            handle=query.handle,
            keys=b"".join(query.keys),
            accept=[int(codec) for codec in query.accept],  # type: ignore[misc]
            lossy_ok=query.lossy_ok,
            session=query.hints.session,
            ttl_ms=query.hints.ttl_ms,
            priority=query.hints.priority,
            traceparent=query.hints.traceparent,
        )
        run = GetRun(sink, len(query.keys))
        async with self._until(deadline) as seconds:
            call = self._callable(rpc.PAGES, "Get")(request, timeout=seconds)
            try:
                async for message in call:
                    run.feed(_parsed(message))
                    await sink.settle()
            finally:
                # Nothing may arrive after the caller has its answer. No effect on a call that
                # ended.
                call.cancel()
        run.finish()

    async def put(
        self, opening: PutOpening, pages: AsyncIterable[OutgoingPage], deadline: Deadline
    ) -> PutReply:
        try:
            answer, count = await self._put(opening, pages, deadline)
        except _LostStatus:
            # Asked again with nothing to send, the daemon says what it has against this put.
            with suppress(_LostStatus):
                await self._put(opening, None, deadline)
            raise DaemonUnavailable(
                "the daemon ended the put before it had everything",
                remedy="put again later; the pages may or may not be stored",
            ) from None
        if not len(answer.slots) == len(answer.generations) == count:
            raise _short_answer(len(answer.slots), count)
        codes = _codes(answer.codes, count)
        return PutReply(codes, answer.boot_id, answer.slots, answer.generations)

    async def delete(self, handle: int, keys: Sequence[bytes], deadline: Deadline) -> bytes:
        request = pages_pb2.DeleteRequest(handle=handle, keys=b"".join(keys))
        answer = await self._pages("Delete", request, deadline)
        return _codes(answer.codes, len(keys))

    async def pin(
        self, handle: int, keys: Sequence[bytes], ttl_ms: int, deadline: Deadline
    ) -> PinReply:
        request = pages_pb2.PinRequest(handle=handle, keys=b"".join(keys), ttl_ms=ttl_ms)
        answer = await self._pages("Pin", request, deadline)
        return PinReply(answer.lease_id, _codes(answer.codes, len(keys)), answer.ttl_ms)

    async def renew(
        self, session_id: int, lease_ids: Sequence[int], ttl_ms: int, deadline: Deadline
    ) -> bytes:
        request = pages_pb2.RenewRequest(session_id=session_id, lease_ids=lease_ids, ttl_ms=ttl_ms)
        answer = await self._pages("Renew", request, deadline)
        return _codes(answer.codes, len(lease_ids))

    async def unpin(self, session_id: int, lease_ids: Sequence[int], deadline: Deadline) -> bytes:
        request = pages_pb2.UnpinRequest(session_id=session_id, lease_ids=lease_ids)
        answer = await self._pages("Unpin", request, deadline)
        return _codes(answer.codes, len(lease_ids))

    async def bump(
        self,
        fingerprint: bytes,
        *,
        expected: int,
        weights_revision: str,
        token: bytes,
        deadline: Deadline,
    ) -> int:
        request = pages_pb2.BumpGenerationRequest(
            fingerprint=fingerprint,
            expected_generation=expected,
            weights_revision=weights_revision,
            token=token,
        )
        answer = await self._pages("BumpGeneration", request, deadline)
        return int(answer.generation)

    async def delete_namespace(self, fingerprint: bytes, deadline: Deadline) -> int:
        request = pages_pb2.DeleteNamespaceRequest(fingerprint=fingerprint)
        answer = await self._pages("DeleteNamespace", request, deadline)
        return int(answer.pages)

    async def capabilities(self, deadline: Deadline) -> Capabilities:
        request = admin_pb2.GetCapabilitiesRequest()
        answer = await self._unary(rpc.ADMIN, "GetCapabilities", request, deadline)
        return capabilities_from_proto(answer)

    async def status(self, deadline: Deadline) -> Status:
        request = admin_pb2.GetStatusRequest()
        answer = await self._unary(rpc.ADMIN, "GetStatus", request, deadline)
        return status_from_proto(answer)

    async def close(self) -> None:
        self._is_closed = True
        channel, self._channel = self._channel, None
        self._callables.clear()
        if channel is not None:
            await channel.close()

    async def _pages(self, name: str, request: Any, deadline: Deadline) -> Any:
        return await self._unary(rpc.PAGES, name, request, deadline)

    async def _unary(self, service: str, name: str, request: Any, deadline: Deadline) -> Any:
        async with self._until(deadline) as seconds:
            return _parsed(await self._callable(service, name)(request, timeout=seconds))

    async def _put(
        self, opening: PutOpening, pages: AsyncIterable[OutgoingPage] | None, deadline: Deadline
    ) -> tuple[Any, int]:
        """The answer, and how many pages it is about."""
        run, count = PutRun(opening), 0
        async with self._until(deadline) as seconds:
            call = self._callable(rpc.PAGES, "Put")(timeout=seconds)
            is_cut_short = False
            try:
                try:
                    if pages is not None:
                        async for page in pages:
                            count += 1
                            for message in run.feed(page):
                                await call.write(message)
                    await call.write(run.finish())
                    await call.done_writing()
                except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                    # The daemon answered before it had everything; the answer says why.
                    is_cut_short = True
                return _parsed(await call), count
            except grpc.aio.AioRpcError as error:
                # grpc.aio can lose the daemon's status when a write fails at the same moment, and
                # then makes up one of its own.
                is_made_up = (
                    error.code() is grpc.StatusCode.INTERNAL and not error.trailing_metadata()
                )
                if is_cut_short and is_made_up:
                    raise _LostStatus from error
                raise
            finally:
                call.cancel()

    def _callable(self, service: str, name: str) -> Any:
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
    async def _until(self, deadline: Deadline) -> AsyncIterator[float]:
        """Around a call: gives its timeout, and turns what grpc raises into errors of ours."""
        seconds = deadline.remaining()
        try:
            # grpc ends a call at its timeout, but for a write into a socket that nobody reads any
            # more: that one waits for the socket.
            async with asyncio.timeout(seconds + _GRACE_S):
                yield seconds
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
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


def _parsed(message: Any) -> Any:
    """grpc gives None for an answer that its deserializer refused."""
    if message is None or message is grpc.aio.EOF:
        raise DaemonUnavailable(
            "the answer of the daemon could not be read",
            remedy="use a client and daemon of the same version",
        )
    return message


def _codes(numbers: Sequence[int], count: int) -> bytes:
    if len(numbers) != count:
        raise _short_answer(len(numbers), count)
    try:
        return bytes(numbers)
    except ValueError:
        # Numbers over 255 come from a version that breaks the rule of page.proto.
        return bytes(number if 0 <= number < 128 else 0 for number in numbers)


def _short_answer(have: int, need: int) -> DaemonUnavailable:
    return DaemonUnavailable(
        f"the daemon answered for {have} items of {need}",
        remedy="use a client and daemon of the same version",
    )
