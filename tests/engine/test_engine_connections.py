"""The server and clients that are rude, slow or gone: each costs its own connection alone."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier_engine.server.app import application
from kvtier_engine.server.http import Refused, Stream
from kvtier_engine.server.limits import Limits
from kvtier_engine.server.listener import bound
from kvtier_engine.server.listening import listening
from tests.engine.engine_rig import engine_of, tiny_model
from tests.engine.server_rig import Served, post_of, serve, to_the_end, until

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
LONG = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True}


@pytest.fixture
def served() -> Iterator[Served]:
    yield from serve(engine_of(tiny_model(), queue_requests_max=8))


def error_of(said: bytes) -> dict[str, object]:
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"]
    return error


def routed(handler: object) -> object:
    return application(Route("/health", handler))


def counted(served: Served, name: str) -> int:
    _, text, _ = served.call("GET", "/metrics")
    return int(text.partition(f"\nkvtier_engine_{name}_total ")[2].partition("\n")[0])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_away_ends_its_request(served: Served, stream: bool) -> None:
    with served.connect() as raw:
        raw.sendall(post_of("/v1/completions", **LONG, stream=stream))
        until(lambda: served.engine.stats()["requests_running"] == 1)
    until(lambda: not served.engine.has_work)
    until(lambda: counted(served, "requests_cancelled") == 1)
    assert counted(served, "requests_failed") == 0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_so_does_one_that_sent_something_before(served: Served, stream: bool) -> None:
    with served.connect() as raw:
        raw.sendall(post_of("/v1/completions", **LONG, stream=stream))
        until(lambda: served.engine.stats()["requests_running"] == 1)
        raw.sendall(b"G")
        time.sleep(0.05)  # a read of its own, if that can be had: together it is a harder case
        raw.sendall(b"E")
    until(lambda: not served.engine.has_work)
    until(lambda: counted(served, "requests_cancelled") == 1)


def test_a_client_that_is_done_with_sending_gets_its_answers(served: Served) -> None:
    ask = post_of("/v1/completions", prompt="abc", max_tokens=30, ignore_eos=True)
    for asks in (ask, ask + HEALTH + ask, HEALTH):
        with served.connect() as raw:
            raw.sendall(asks)
            raw.shutdown(socket.SHUT_WR)
            said = to_the_end(raw)
        signs = said.count(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert said.count(b"HTTP/1.1 ") - signs == asks.count(b"HTTP/1.1")
        assert said.count(b"HTTP/1.1 200 ") == asks.count(b"HTTP/1.1")


def test_one_that_is_done_after_bad_bytes_is_refused_quietly(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    ask = post_of("/v1/completions", prompt="abc", max_tokens=30, ignore_eos=True)
    bad = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"
    with served.connect() as raw:
        raw.sendall(ask + bad)
        raw.shutdown(socket.SHUT_WR)
        begun = time.monotonic()
        said = to_the_end(raw)
    assert (said.count(b"HTTP/1.1 200 "), said.count(b"HTTP/1.1 400 ")) == (1, 1)
    assert served.call("GET", "/health")[0] == 200
    until(lambda: time.monotonic() > begun + 0.6)  # as long as signs would be sent
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_one_that_goes_after_its_first_answer_ends_the_second(served: Served) -> None:
    """It had sent both, and was done with sending."""
    with served.connect() as raw:
        raw.sendall(post_of("/v1/completions", **LONG | {"max_tokens": 3}))
        raw.sendall(post_of("/v1/completions", **LONG))
        raw.shutdown(socket.SHUT_WR)
        until(lambda: served.engine.stats().get("requests") == 2)
    until(lambda: not served.engine.has_work)
    until(lambda: counted(served, "requests_cancelled") == 1)
    assert counted(served, "requests_done") == 1


def test_a_stream_of_a_client_that_closed_at_once_is_ended() -> None:
    """The handler's answer and the end of the connection are there in one turn of the loop."""
    made: list[str] = []

    async def events() -> AsyncGenerator[str, None]:
        yield "never sent"

    async def main() -> None:
        ended = asyncio.Event()

        async def handler(_: Request) -> Response:
            made.append("made")
            return Stream(events(), ended.set)

        async with listening(routed(handler), Limits(), bound("127.0.0.1", 0)) as [address]:
            with socket.create_connection(address) as raw:  # the loop sees it when it is closed
                raw.sendall(HEALTH)
            await asyncio.wait_for(ended.wait(), 20)

    asyncio.run(main())
    assert made == ["made"]


def test_clients_that_send_and_close_at_once_leave_nothing(served: Served) -> None:
    for _ in range(20):
        with served.connect() as raw:
            raw.sendall(post_of("/v1/completions", **LONG, stream=True))
    assert served.call("GET", "/health")[0] == 200
    until(lambda: not served.engine.has_work)


def test_what_is_sent_ahead_is_kept_and_bounded() -> None:
    for served in serve(engine_of(tiny_model()), early_bytes_max=1000):
        ask = post_of("/v1/completions", prompt="abc", max_tokens=30, ignore_eos=True)
        said = served.said_to(ask + LAST)
        assert said.count(b"HTTP/1.1 200 ") == 2
        with served.connect() as raw:
            raw.sendall(post_of("/v1/completions", **LONG))
            until(lambda to=served: to.engine.stats()["requests_running"] == 1)
            raw.sendall(b"x" * 2000)
            said = to_the_end(raw)
        assert said.startswith(b"HTTP/1.1 400 ")
        assert error_of(said)["code"] == "sent_ahead"
        until(lambda to=served: not to.engine.has_work)


def test_head_is_get_without_a_body(served: Served) -> None:
    said = served.said_to(HEALTH.replace(b"GET", b"HEAD") + LAST.replace(b"/health", b"/nothing"))
    first, _, second = said.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert b"content-length: 16" in first.lower()
    assert second.startswith(b"HTTP/1.1 404 ")
    for method, path, allowed in [
        ("HEAD", "/v1/completions", "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/health", "GET, HEAD"),
    ]:
        ask = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        said = served.said_to(ask.encode())
        assert said.startswith(b"HTTP/1.1 405 ")
        assert f"\r\nallow: {allowed}\r\n".encode() in said


def test_a_flood_of_headers_is_431(served: Served) -> None:
    flood = b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(30_000))
    said = served.said_to(flood)
    assert said.startswith(b"HTTP/1.1 431 ")
    assert error_of(said)["type"] == "invalid_request_error"


def test_a_length_that_is_too_much_is_refused_before_it_comes(served: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    with served.connect() as raw:
        raw.sendall(head % (9 << 20))
        said = b""
        while not said.endswith(b"}}"):  # the server does not wait for more
            said += raw.recv(1 << 16)
        raw.sendall(b"x" * 1000)
    assert said.startswith(b"HTTP/1.1 413 ")
    assert error_of(said)["code"] == "request_too_large"
    said = served.said_to(head % (9 << 20) + b"x" * (9 << 20))
    assert error_of(said)["code"] == "request_too_large"
    chunks = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    said = served.said_to(chunks + (b"100000\r\n" + b"x" * (1 << 20) + b"\r\n") * 9 + b"0\r\n\r\n")
    assert error_of(said)["code"] == "request_too_large"


def test_bodies_of_all_connections_together_are_bounded() -> None:
    for served in serve(engine_of(tiny_model()), bodies_bytes_max=1000):
        with served.connect() as slow:
            slow.sendall(post_of("/v1/completions", prompt="a" * 900)[:-5])
            deadline = time.monotonic() + 40
            said = b"HTTP/1.1 200"
            while said.startswith(b"HTTP/1.1 200"):  # until the one before has arrived
                said = served.said_to(
                    post_of("/v1/completions", prompt="a" * 100, max_tokens=1).replace(
                        b"host: x", b"host: x\r\nconnection: close"
                    )
                )
                assert time.monotonic() < deadline
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in said.lower()
        # Given back when that client is gone.
        until(lambda to=served: to.post("/v1/completions", prompt="a" * 100)[0] == 200)


#: An answer that does not wait for the body, and then what is no body.
EARLY = {
    "chunks": (b"POST /nope HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"zz\r\n"),
    "method": (
        b"PUT /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
        b"\x00\x01\r\n",
    ),
    "next": (
        b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n12345",
        b"67890\x00\x01garbage\r\n\r\n",
    ),
}


@pytest.mark.parametrize("name", EARLY)
def test_bad_bytes_after_an_early_answer_end_the_connection_quietly(
    served: Served, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = EARLY[name]
    with served.connect() as raw:
        raw.sendall(first)
        said = b""
        while not said.endswith(b"}}"):
            said += raw.recv(1 << 16)
        raw.sendall(second)
        said += to_the_end(raw)
    # After the whole body it is a request of its own, which is answered.
    assert said.count(b"HTTP/1.1 ") == (2 if name == "next" else 1)
    assert said.startswith(b"HTTP/1.1 40")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert served.call("GET", "/health")[0] == 200


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_an_offer_of_another_protocol_changes_nothing(
    served: Served, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    offer = b"host: x\r\nconnection: upgrade, http2-settings\r\nupgrade: "
    for kind in (b"h2c", b"websocket"):
        said = served.said_to(HEALTH.replace(b"host: x", offer + kind) + LAST)
        assert said.count(b"HTTP/1.1 200 ") == 2
    with served.connect() as raw:
        ask = post_of("/v1/completions", **LONG, stream=stream)
        raw.sendall(ask.replace(b"host: x", offer + b"h2c"))
        until(lambda: served.engine.stats()["requests_running"] == 1)
        raw.sendall(b"G")
        time.sleep(0.05)
    until(lambda: not served.engine.has_work)
    until(lambda: counted(served, "requests_cancelled") == 1)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_connections_are_bounded() -> None:
    for served in serve(engine_of(tiny_model()), connections_max=2, linger_seconds_max=0.2):
        with served.connect() as one, served.connect() as two:
            for raw in (one, two):
                raw.sendall(HEALTH)
                assert raw.recv(1000).startswith(b"HTTP/1.1 200 ")
            said = served.said_to(LAST)
            assert said.startswith(b"HTTP/1.1 503 ")
            assert error_of(said)["code"] == "server_overloaded"

        def answers(to: Served = served) -> bool:
            return to.said_to(LAST).startswith(b"HTTP/1.1 200 ")

        until(answers)


def test_a_request_that_does_not_come_to_an_end_is_408() -> None:
    for served in serve(engine_of(tiny_model()), request_seconds_max=0.3, idle_seconds_max=30.0):
        assert error_of(served.said_to(HEALTH[:-2]))["code"] == "request_timeout"
        whole = post_of("/v1/completions", prompt="a")
        with served.connect() as raw:
            raw.sendall(whole[:-20])
            stop = threading.Event()

            def drip(to: socket.socket = raw, until_then: threading.Event = stop) -> None:
                while not until_then.wait(0.1):
                    try:
                        to.sendall(b" ")
                    except OSError:
                        return

            dripping = threading.Thread(target=drip)
            dripping.start()
            said = raw.recv(1 << 16)
            stop.set()
            dripping.join()
        assert said.startswith(b"HTTP/1.1 408 ")


def test_a_connection_without_a_request_is_closed() -> None:
    for served in serve(engine_of(tiny_model()), idle_seconds_max=0.2):
        assert served.said_to(b"") == b""
        assert served.said_to(HEALTH).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_does_not_read_is_dropped() -> None:
    """The handler never runs dry: without a deadline this goes on for ever."""

    async def forever() -> AsyncGenerator[str, None]:
        while True:
            yield "x" * (1 << 16)

    async def main() -> None:
        ended = asyncio.Event()

        async def handler(_: Request) -> Response:
            return Stream(forever(), ended.set)

        limits = Limits(write_seconds_max=0.3, linger_seconds_max=0.3)
        async with listening(routed(handler), limits, bound("127.0.0.1", 0)) as [address]:
            with socket.create_connection(address) as raw:
                raw.sendall(HEALTH)
                await asyncio.wait_for(ended.wait(), 40)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_defect_is_500_without_details_and_logged(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[bytes] = []

    async def broken() -> AsyncGenerator[str, None]:
        yield "first"
        raise ZeroDivisionError("secret")

    async def handler(_: Request) -> Response:
        if stream:
            return Stream(broken(), lambda: said.append(b"ended"))
        raise ZeroDivisionError("secret")

    async def main() -> None:
        async with listening(routed(handler), Limits(), bound("127.0.0.1", 0)) as [address]:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(LAST)
            said.append(await reader.read())
            writer.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(main(), 40))
    assert b"internal_error" in said[-1]
    assert b"secret" not in said[-1]
    assert said[-1].startswith(b"HTTP/1.1 200 " if stream else b"HTTP/1.1 500 ")
    assert (said[0] == b"ended") is stream
    assert "ZeroDivisionError: secret" in caplog.text


def test_a_refusal_says_when_to_come_again() -> None:
    assert Refused(503, "code", "message").headers["retry-after"] == "1"
    assert "retry-after" not in Refused(413, "code", "message").headers
