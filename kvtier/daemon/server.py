"""The gRPC server: addresses, health, reflection, and the border around every call.

The border admits a call or refuses it (starting, draining, too much under way), measures it, and
turns what no service expected into a logged INTERNAL error, so that one call's mistake never ends
the process. Event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvtier.config.kinds import parse_listen
from kvtier.config.load import Effective
from kvtier.daemon.node import Node, NodeState
from kvtier.daemon.services_admin import AdminService
from kvtier.daemon.services_pages import PagesService
from kvtier.daemon.sockets import Refuse, check_tcp_free, claimed_socket
from kvtier.errors import KvtierError
from kvtier.transfer.grpc_status import code_of
from kvtier.transfer.rpc import (
    ADMIN,
    METHODS,
    PAGES,
    SERVER_OPTIONS,
    Handler,
    Kind,
    Method,
    generic_handler,
    implemented,
)

__all__ = ["SELF_TEST_KEY", "Server"]

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

#: Metadata of the daemon's own calls to itself.
SELF_TEST_KEY = "kvtier-self-test"

#: Answered in every state and beyond every bound: how to see what is wrong, and how to let go.
_ALWAYS = frozenset(("GetCapabilities", "GetStatus", "Drain", "CloseSession", "Unpin"))
_SERVICES = (PAGES, ADMIN)
#: Above this the transport cuts off by itself; below it we say which limit was passed.
_TRANSPORT_MARGIN = 2


class Server:
    """Bind, start, say that it serves, stop."""

    def __init__(self, node: Node, effective: Effective) -> None:
        self._node = node
        self._effective = effective
        self._server = grpc.aio.server(options=_options(node))
        self._health = health.aio.HealthServicer()
        methods: list[str] = []
        pages = PagesService(node)
        admin = AdminService(node, methods)
        methods += implemented(PAGES, pages) + implemented(ADMIN, admin)
        handlers = [
            generic_handler(PAGES, _bordered(node, PAGES, pages)),
            generic_handler(ADMIN, _bordered(node, ADMIN, admin)),
        ]
        self._server.add_generic_rpc_handlers(handlers)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Listens on every address. Raises InvalidConfigValue for one that cannot be had."""
        await self.set_serving(False)
        for text in self._effective.config.daemon.listen:
            self._node.listening.append(self._bind(text))
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers."""
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if serving else states.NOT_SERVING
        for service in ("", *_SERVICES):
            await self._health.set(service, state)

    async def stop(self, grace_s: float) -> None:
        """Takes no new connection; calls under way have `grace_s`, then they are cancelled."""
        await self._server.stop(grace_s)

    def _bind(self, text: str) -> str:
        address = parse_listen(text)

        def refuse(reason: str, remedy: str) -> KvtierError:
            return self._effective.invalid("daemon.listen", f"{text}: {reason}", remedy=remedy)

        if address.path is not None:
            with claimed_socket(address.path, refuse):
                self._add_port(address.grpc_target, refuse)
            return address.url()
        if address.port:
            check_tcp_free(address.host, address.port, refuse)
        return address.url(self._add_port(address.grpc_target, refuse))

    def _add_port(self, target: str, refuse: Refuse) -> int:
        try:
            return self._server.add_insecure_port(target)
        except RuntimeError as error:
            raise refuse("the address cannot be bound", "Name an address that is free.") from error


def _options(node: Node) -> list[tuple[str, int]]:
    config = node.config
    message_bytes = config.limits.message_bytes_max * _TRANSPORT_MARGIN
    own = {
        "grpc.max_receive_message_length": min(message_bytes, 2**31 - 1),
        "grpc.max_send_message_length": -1,
        "grpc.keepalive_time_ms": round(config.grpc.keepalive_time_s * 1000),
        "grpc.keepalive_timeout_ms": round(config.grpc.keepalive_timeout_s * 1000),
    }
    return list((dict(SERVER_OPTIONS) | own).items())


def _bordered(node: Node, service: str, implementation: object) -> SimpleNamespace:
    """The implementation with the border around each of its methods."""
    return SimpleNamespace(
        **{
            method.attribute: _border(node, method, getattr(implementation, method.attribute))
            for method in METHODS[service].values()
            if hasattr(implementation, method.attribute)
        }
    )


def _border(node: Node, method: Method, implement: Handler) -> Callable[..., Any]:
    async def call(request: Any, context: Context) -> Any:
        started = time.monotonic()
        status = grpc.StatusCode.OK.name
        try:
            with _admitted(node, method, context):
                return await implement(request, context)
        except KvtierError as error:
            status = code_of(error).name
            raise
        except asyncio.CancelledError:
            status = grpc.StatusCode.CANCELLED.name
            raise
        except Exception as error:
            # Writing to a caller that has gone: gRPC says so with an error of its own, sometimes
            # before the context does.
            if context.done() or type(error).__module__.startswith("grpc"):
                status = grpc.StatusCode.CANCELLED.name
                raise asyncio.CancelledError from None
            status = grpc.StatusCode.INTERNAL.name
            log.exception("rpc.crashed", extra={"rpc": method.name})
        finally:
            node.metrics.rpc_ended(method.name, status, time.monotonic() - started)
        return await context.abort(grpc.StatusCode.INTERNAL, "unexpected error: see the log")

    return call


def _admitted(node: Node, method: Method, context: Context) -> AbstractContextManager[None]:
    """Raises DaemonUnavailable or Busy, here or on entering."""
    if method.name in _ALWAYS or _is_self_test(node, context):
        return nullcontext()
    node.refuse_unless_serving()
    return node.admission.call() if method.kind is Kind.UNARY else node.admission.stream()


def _is_self_test(node: Node, context: Context) -> bool:
    if node.state is not NodeState.STARTING:
        return False
    metadata = context.invocation_metadata() or ()
    return any(key == SELF_TEST_KEY and value == node.self_test_token for key, value in metadata)
