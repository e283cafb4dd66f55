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
import time
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc
import grpc.aio

from kvtier.core.page import PageRef, Tier
from kvtier.errors import DaemonUnavailable
from kvtier.transfer import rpc
from kvtier.transfer.messages import layout_to_proto, pool_to_proto, shard_to_proto
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.grpc_channel import GrpcChannel, parsed
from kvtier.transfer.planes.grpc_values import (
    capabilities_from_proto,
    progress_from_proto,
    quarantine_from_proto,
    ref_to_proto,
    status_from_proto,
)
from kvtier.transfer.planes.grpc_watch import next_report, watch
from kvtier.transfer.planes.streams import GetRun, PutRun
from kvtier.transfer.planes.values import (
    Capabilities,
    FlushResult,
    GetQuery,
    Hints,
    LookupReply,
    NamespaceRequest,
    OpenedNamespace,
    OutgoingPage,
    PageSink,
    PinReply,
    PoolReport,
    PutOpening,
    PutReply,
    QuarantinedPage,
    Residency,
    Status,
    VerifyProgress,
)
from kvtier.v1 import admin_pb2, pages_pb2, transfer_pb2

__all__ = ["GrpcPlane"]


class _LostStatus(Exception):
    """A put ended early and nobody can say with what."""


class GrpcPlane:
    """`url` is unix:///path or grpc://host:port. Raises InvalidConfigValue, NotImplementedYet."""

    name: Final = "grpc"

    def __init__(self, url: str) -> None:
        self._channel = GrpcChannel(url)

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
            namespace_number=answer.namespace_number,
        )

    async def close_session(self, session_id: int, deadline: Deadline) -> None:
        request = pages_pb2.CloseSessionRequest(session_id=session_id)
        await self._pages("CloseSession", request, deadline)

    async def lookup(
        self,
        handle: int,
        keys: Sequence[bytes],
        hints: Hints,
        deadline: Deadline,
        *,
        is_exact: bool = False,
    ) -> LookupReply:
        request = pages_pb2.LookupRequest(
            handle=handle, keys=b"".join(keys), hints=_call_hints(hints), exact=is_exact
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
            reader_verifies=query.reader_verifies,
        )
        run = GetRun(sink, len(query.keys))
        async with self._channel.until(deadline) as seconds:
            call = self._channel.callable(rpc.PAGES, "Get")(request, timeout=seconds)
            try:
                async for message in call:
                    run.feed(parsed(message))
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
        # A daemon from before there was an NVMe tier says nothing of what was reached.
        reached = _codes(answer.reached or bytes(count), count)
        return PutReply(codes, answer.boot_id, answer.slots, answer.generations, reached)

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

    async def prefetch(
        self, handle: int, keys: Sequence[bytes], hints: Hints, deadline: Deadline
    ) -> bytes:
        request = pages_pb2.PrefetchRequest(
            handle=handle, keys=b"".join(keys), hints=_call_hints(hints)
        )
        answer = await self._pages("Prefetch", request, deadline)
        return _codes(answer.codes, len(keys))

    async def expect(
        self, handle: int, key: bytes, returns_after_ms: int | None, deadline: Deadline
    ) -> bool:
        request = pages_pb2.ExpectRequest(
            handle=handle,
            key=key,
            ended=returns_after_ms is None,
            return_ms=returns_after_ms or 0,
        )
        answer = await self._pages("Expect", request, deadline)
        return bool(answer.heeded)

    async def demote(self, handle: int, keys: Sequence[bytes], deadline: Deadline) -> bytes:
        request = pages_pb2.DemoteRequest(handle=handle, keys=b"".join(keys))
        answer = await self._pages("Demote", request, deadline)
        return _codes(answer.codes, len(keys))

    async def flush(self, session_id: int, deadline: Deadline) -> FlushResult:
        request = pages_pb2.FlushRequest(session_id=session_id)
        answer = await self._pages("Flush", request, deadline)
        return FlushResult(pages=answer.pages, pages_lost=answer.pages_lost)

    async def report_pool(
        self, session_id: int, pool: PoolReport, *, is_gone: bool, deadline: Deadline
    ) -> None:
        request = pages_pb2.ReportPoolRequest(
            session_id=session_id, pool=pool_to_proto(pool), gone=is_gone
        )
        await self._pages("ReportPool", request, deadline)

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
        answer = await self._admin("GetCapabilities", request, deadline)
        return capabilities_from_proto(answer)

    async def status(self, deadline: Deadline) -> Status:
        request = admin_pb2.GetStatusRequest()
        answer = await self._admin("GetStatus", request, deadline)
        return status_from_proto(answer)

    async def verify(
        self, tier: Tier, bytes_per_second: int, *, silence_s: float
    ) -> AsyncGenerator[VerifyProgress, None]:
        request = admin_pb2.VerifyRequest(
            tier=int(tier),  # type: ignore[arg-type]
            bytes_per_second=bytes_per_second,
        )
        call = None
        try:
            while True:
                # No timeout of grpc's own: the whole may take hours. Each report has its time.
                within = Deadline(time.monotonic() + silence_s)
                async with self._channel.until(within) as seconds:
                    if call is None:
                        call = self._channel.callable(rpc.ADMIN, "Verify")(request)
                    report = await next_report(call, seconds)
                if report is grpc.aio.EOF:
                    return
                yield progress_from_proto(parsed(report))
        finally:
            if call is not None:
                call.cancel()

    def watch(
        self, fingerprint: bytes, deadline: Deadline, *, silence_s: float | None = None
    ) -> AsyncGenerator[Residency, None]:
        return watch(self._channel, fingerprint, deadline, silence_s=silence_s)

    async def list_quarantine(self, deadline: Deadline) -> tuple[QuarantinedPage, ...]:
        answer = await self._admin("ListQuarantine", admin_pb2.ListQuarantineRequest(), deadline)
        return quarantine_from_proto(answer)

    async def read_quarantine(self, ref: PageRef, deadline: Deadline) -> bytes:
        request = admin_pb2.ReadQuarantineRequest(ref=ref_to_proto(ref))
        record = bytearray()
        async with self._channel.until(deadline) as seconds:
            call = self._channel.callable(rpc.ADMIN, "ReadQuarantine")(request, timeout=seconds)
            try:
                async for message in call:
                    record += parsed(message).data
            finally:
                call.cancel()
        return bytes(record)

    async def clear_quarantine(self, refs: Sequence[PageRef], deadline: Deadline) -> int:
        request = admin_pb2.ClearQuarantineRequest(refs=[ref_to_proto(ref) for ref in refs])
        answer = await self._admin("ClearQuarantine", request, deadline)
        return int(answer.pages)

    async def close(self) -> None:
        await self._channel.close()

    async def _pages(self, name: str, request: Any, deadline: Deadline) -> Any:
        return await self._channel.unary(rpc.PAGES, name, request, deadline)

    async def _admin(self, name: str, request: Any, deadline: Deadline) -> Any:
        return await self._channel.unary(rpc.ADMIN, name, request, deadline)

    async def _put(
        self, opening: PutOpening, pages: AsyncIterable[OutgoingPage] | None, deadline: Deadline
    ) -> tuple[Any, int]:
        """The answer, and how many pages it is about."""
        run, count = PutRun(opening), 0
        async with self._channel.until(deadline) as seconds:
            call = self._channel.callable(rpc.PAGES, "Put")(timeout=seconds)
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
                except (asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.InternalError):
                    # The daemon answered before it had everything, or went away; the answer says
                    # why.
                    is_cut_short = True
                return parsed(await call), count
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


def _call_hints(hints: Hints) -> pages_pb2.CallHints:
    return pages_pb2.CallHints(
        session=hints.session,
        ttl_ms=hints.ttl_ms,
        priority=hints.priority,
        traceparent=hints.traceparent,
    )


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
