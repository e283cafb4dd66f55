"""Where the server listens, and what becomes of it when uvicorn is another, or ends by itself."""

from __future__ import annotations

import asyncio
import http.client
import resource
import socket
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtier_engine.server import listening as module
from kvtier_engine.server.app import application
from kvtier_engine.server.errors import (
    AddressUnusable,
    DescriptorsFew,
    ServerEnded,
    UvicornUnsuitable,
)
from kvtier_engine.server.limits import Limits
from kvtier_engine.server.listener import bound, url_of, within_descriptors
from kvtier_engine.server.listening import listening


async def yes(_: Request) -> Response:
    return Response("yes")


APP = application(Route("/", yes))


def asked(host: str, port: int) -> bytes:
    connection = http.client.HTTPConnection(host, port, timeout=40)
    connection.request("GET", "/")
    said = connection.getresponse().read()
    connection.close()
    return said


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """These are what every name stands for."""

    def found(host: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_all_addresses_of_a_name_are_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        # The third is none of this machine: the others are enough.
        named(patched, "127.0.0.1", "127.0.0.2", "192.0.2.1", "127.0.0.1")
        sockets = bound("somewhere", 0)

    async def main() -> None:
        async with listening(APP, Limits(), sockets) as addresses:
            assert [host for host, _ in addresses] == ["127.0.0.1", "127.0.0.2"]
            assert len({port for _, port in addresses}) == 1
            for host, port in addresses:
                assert await asyncio.to_thread(asked, host, port) == b"yes"

    asyncio.run(main())


def test_no_address_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "192.0.2.1")
    with pytest.raises(AddressUnusable, match="--host somewhere: "):
        bound("somewhere", 0)


def test_somebody_who_listens_first_is_told() -> None:
    sockets = bound("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]

    async def main() -> None:
        async with listening(APP, Limits(), sockets):
            raise AssertionError("entered")

    # Neither listens yet, so both may be bound.
    with socket.create_server(("127.0.0.1", port)), pytest.raises(AddressUnusable) as caught:
        asyncio.run(main())
    assert f"--port {port}: " in str(caught.value)


def test_an_address_of_ipv6_has_brackets() -> None:
    assert url_of(("::1", 8000)) == "http://[::1]:8000"
    assert url_of(("127.0.0.1", 80)) == "http://127.0.0.1:80"


@pytest.mark.parametrize("how", ["returns", "fails"])
def test_a_server_that_ends_by_itself_ends_the_block(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    async def serve(self: object, sockets: object) -> None:
        if how == "fails":
            raise OSError("no more")

    monkeypatch.setattr(module._Server, "serve", serve)

    async def main() -> None:
        async with listening(
            APP, Limits(), bound("127.0.0.1", 0), ending=lambda: told.append("ended")
        ):
            await asyncio.sleep(40)

    with pytest.raises(ServerEnded):
        asyncio.run(asyncio.wait_for(main(), 30))
    assert told == ["ended"]


def test_a_block_that_is_cancelled_by_others_stays_so() -> None:
    async def main() -> None:
        async with listening(APP, Limits(), bound("127.0.0.1", 0)):
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(40)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def test_a_uvicorn_that_is_built_another_way_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(H11Protocol, "handle_events")

    async def main() -> None:
        async with listening(APP, Limits(), bound("127.0.0.1", 0)):
            raise AssertionError("entered")

    with pytest.raises(UvicornUnsuitable, match="no handle_events"):
        asyncio.run(main())


def test_connections_are_as_many_as_there_are_descriptors_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[int, int]] = []
    limit = [1024, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: given.append(pair))
    many = within_descriptors(Limits()).connections_max
    assert 300 < many < 500
    assert not given
    limit[:] = [1024, resource.RLIM_INFINITY]
    assert within_descriptors(Limits()).connections_max == Limits().connections_max
    assert given[0][0] > 2 * Limits().connections_max
    limit[:] = [1024, 2000]
    assert within_descriptors(Limits()).connections_max > many
    assert given[1] == (2000, 2000)
    limit[:] = [100, 100]
    with pytest.raises(DescriptorsFew, match="100 descriptors"):
        within_descriptors(Limits())
