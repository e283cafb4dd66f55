"""A server on a port of its own, in a thread, and calls to it with the standard library."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvtier_engine.engine import Engine
from kvtier_engine.server.app import App, serving
from kvtier_engine.server.limits import Limits
from kvtier_engine.server.listener import bound


@dataclass(frozen=True)
class Served:
    engine: Engine
    port: int
    #: Begins to end the server.
    stop: Callable[[], None]

    def call(self, method: str, path: str, body: object = None) -> tuple[int, Any, dict[str, str]]:
        """(status, content, headers) of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=50)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data if method == "POST" else None)
            response = connection.getresponse()
            text = response.read().decode()
            is_json = response.headers["content-type"] == "application/json"
            return response.status, json.loads(text) if is_json else text, dict(response.headers)
        finally:
            connection.close()

    def post(self, path: str, **body: object) -> tuple[int, Any, dict[str, str]]:
        return self.call("POST", path, {"model": "tiny", "temperature": 0, **body})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=50)

    def said_to(self, data: bytes) -> bytes:
        """All that comes back for these bytes, until the server ends the connection."""
        with self.connect() as raw:
            raw.sendall(data)
            return to_the_end(raw)


def to_the_end(raw: socket.socket) -> bytes:
    said = b""
    while data := raw.recv(1 << 16):
        said += data
    return said


def post_of(path: str, **body: object) -> bytes:
    """The bytes of a request."""
    data = json.dumps({"model": "tiny", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.01)


def serve(engine: Engine, **limits: object) -> Iterator[Served]:
    """The server ends, with the engine still there, when the caller goes on."""
    ready: list[int] = []
    started, ended = threading.Event(), threading.Event()

    async def main() -> None:
        app = App(engine, limits=Limits(**limits))
        async with serving(app, bound("127.0.0.1", 0)) as [(_, port)]:
            ready.append(port)
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    with engine:
        thread.start()
        assert started.wait(40)
        try:
            yield Served(engine, ready[0], ended.set)
        finally:
            ended.set()
            thread.join()
