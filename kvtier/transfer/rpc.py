"""The rpcs of kvtier.v1 as one table made from the descriptors, for both ends of a connection.

Promise: server and client use the same names, kinds and (de)serializers, and no generated stub
stands between. The two bulk messages go through `wire`: their sender encodes them itself
(`wire.encode_put`, `wire.encode_get`) and hands `bytes` to grpc; their receiver gets `PutMessage`
and `GetMessage`. Every other message is its protobuf class.

The implementation of a service is any object whose async methods are named like the rpcs in
snake_case (`OpenNamespace` -> `open_namespace`) and take `(request, context)`, or
`(request_iterator, context)` for Put. A method that streams its answer may be an async generator or
write to the context. It says an error by raising a KvtierError, which leaves as that class's
status; an rpc it has no method for answers NotImplementedYet.

The table is immutable: usable from any thread. Handlers and channels belong to the event loop they
are made in.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError

from kvtier.errors import ChunkError, KvtierError, NotImplementedYet
from kvtier.transfer import wire
from kvtier.transfer.grpc_status import to_status
from kvtier.v1 import admin_pb2, pages_pb2

__all__ = [
    "ADMIN",
    "CHANNEL_OPTIONS",
    "MESSAGE_BYTES_MAX",
    "METHODS",
    "PAGES",
    "SERVER_OPTIONS",
    "Kind",
    "Method",
    "generic_handler",
    "implemented",
    "multicallable",
]

PAGES: Final = "kvtier.v1.Pages"
ADMIN: Final = "kvtier.v1.Admin"

#: What either side accepts in one message. Pages of any size go in chunks, so this bounds only a
#: chunk with its announcements and the key list of a batch (16 Mi / 32 bytes = 524,288 keys).
MESSAGE_BYTES_MAX: Final = 16 << 20

_KEEPALIVE_MS: Final = 10_000

_BOTH: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # A ping may go out however long no data did: otherwise an idle connection stops noticing a dead
    # peer.
    ("grpc.http2.max_pings_without_data", 0),
)

#: Reconnecting begins after 100 ms and tries at least once a second, so that a restarted daemon is
#: found again well within 5 s. grpc never repeats a call by itself: whether a call may be repeated
#: is decided above it.
CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_BOTH,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

#: The server's part: pings of CHANNEL_OPTIONS must not count as abuse, whatever the client's
#: timing.
SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_BOTH,
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)

Deserializer = Callable[[bytes], Any]
Serializer = Callable[[Any], bytes]
Handler = Callable[[Any, "grpc.aio.ServicerContext[Any, Any]"], Any]


class Kind(Enum):
    UNARY = "unary"
    STREAM_OUT = "stream out"  # one request, many answers
    STREAM_IN = "stream in"  # many requests, one answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One rpc. A serializer of None means that the sender hands over the encoded bytes."""

    service: str
    name: str
    attribute: str  # the name of the method that implements it
    kind: Kind
    serialize_request: Serializer | None
    parse_request: Deserializer
    serialize_response: Serializer | None
    parse_response: Deserializer

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


def _method(descriptor: MethodDescriptor) -> Method:
    assert not (descriptor.client_streaming and descriptor.server_streaming), descriptor.full_name
    kind = Kind.UNARY
    if descriptor.client_streaming:
        kind = Kind.STREAM_IN
    elif descriptor.server_streaming:
        kind = Kind.STREAM_OUT
    request: Any = message_factory.GetMessageClass(descriptor.input_type)
    response: Any = message_factory.GetMessageClass(descriptor.output_type)
    bulk_in = descriptor.input_type.full_name == "kvtier.v1.PutRequest"
    bulk_out = descriptor.output_type.full_name == "kvtier.v1.GetResponse"
    return Method(
        service=descriptor.containing_service.full_name,
        name=descriptor.name,
        attribute=re.sub(r"(?<!^)(?=[A-Z])", "_", descriptor.name).lower(),
        kind=kind,
        serialize_request=None if bulk_in else request.SerializeToString,
        parse_request=wire.parse_put if bulk_in else _parser(request),
        serialize_response=None if bulk_out else response.SerializeToString,
        parse_response=wire.parse_get if bulk_out else _parser(response),
    )


def _parser(message_class: Any) -> Deserializer:
    def parse(raw: bytes) -> Any:
        try:
            return message_class.FromString(raw)
        except DecodeError as error:
            name = message_class.DESCRIPTOR.full_name
            raise ChunkError(
                f"not a {name}: {error}", remedy="make the message from proto/kvtier/v1"
            ) from None

    return parse


def _table() -> dict[str, Mapping[str, Method]]:
    services = (
        pages_pb2.DESCRIPTOR.services_by_name["Pages"],
        admin_pb2.DESCRIPTOR.services_by_name["Admin"],
    )
    return {
        service.full_name: MappingProxyType({m.name: _method(m) for m in service.methods})
        for service in services
    }


#: service -> rpc name -> Method
METHODS: Final[Mapping[str, Mapping[str, Method]]] = MappingProxyType(_table())


def multicallable(channel: grpc.aio.Channel, method: Method) -> Any:
    """grpc.aio's callable for `method`: `(request, timeout=)`, for Put `(iterator, timeout=)`."""
    make = {
        Kind.UNARY: channel.unary_unary,
        Kind.STREAM_OUT: channel.unary_stream,
        Kind.STREAM_IN: channel.stream_unary,
    }[method.kind]
    return make(
        method.path,
        request_serializer=method.serialize_request,
        response_deserializer=method.parse_response,
    )


def implemented(service: str, implementation: object) -> list[str]:
    """Names ("Pages.Get") of the rpcs of `service` that `implementation` has a method for."""
    short = service.rpartition(".")[2]
    methods = METHODS[service].values()
    return [f"{short}.{m.name}" for m in methods if hasattr(implementation, m.attribute)]


def generic_handler(service: str, implementation: object) -> grpc.GenericRpcHandler:
    """For `grpc.aio.Server.add_generic_rpc_handlers`: `service` as `implementation` does it."""
    handlers: dict[str, Any] = {}
    for method in METHODS[service].values():
        implement: Handler = getattr(implementation, method.attribute, _missing(method))
        if method.kind is Kind.UNARY:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                _answer(method, implement),
                request_deserializer=None,
                response_serializer=method.serialize_response,
            )
        elif method.kind is Kind.STREAM_OUT:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                _stream_answer(method, implement),
                request_deserializer=None,
                response_serializer=method.serialize_response,
            )
        else:
            handlers[method.name] = grpc.stream_unary_rpc_method_handler(
                _collect(implement),
                request_deserializer=method.parse_request,
                response_serializer=method.serialize_response,
            )
    return grpc.method_handlers_generic_handler(service, handlers)


# A single request is parsed in the handler, not by grpc: grpc answers UNKNOWN when a deserializer
# raises.


def _answer(method: Method, implement: Handler) -> Handler:
    async def answer(raw: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await implement(method.parse_request(raw), context)
        except KvtierError as error:
            await context.abort(*to_status(error))

    return answer


def _stream_answer(method: Method, implement: Handler) -> Handler:
    if not inspect.isasyncgenfunction(implement):
        return _answer(method, implement)

    async def answer(raw: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            # Closed here and now when the call is cancelled, so that what it holds is let go at
            # once.
            async with aclosing(implement(method.parse_request(raw), context)) as responses:
                async for response in responses:
                    yield response
        except KvtierError as error:
            await context.abort(*to_status(error))

    return answer


def _collect(implement: Handler) -> Handler:
    async def answer(
        requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        try:
            return await implement(requests, context)
        except KvtierError as error:
            await context.abort(*to_status(error))

    return answer


def _missing(method: Method) -> Callable[..., Awaitable[Any]]:
    async def answer(_request: Any, _context: Any) -> Any:
        raise NotImplementedYet(
            f"{method.service}.{method.name} is not in this version of the daemon",
            remedy="the methods of this daemon are listed in its capabilities",
        )

    return answer
