"""A server on a port of its own, in a thread, and calls to it with the standard library."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtier_engine.engine import Engine
from kvtier_engine.server.app import App, listen


@dataclass(frozen=True)
class Served:
    engine: Engine
    port: int

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


def serve(engine: Engine) -> Iterator[Served]:
    ready: list[int] = []
    started, ended = threading.Event(), threading.Event()

    async def main() -> None:
        server = await listen(App(engine), "127.0.0.1", 0)
        ready.append(server.sockets[0].getsockname()[1])
        started.set()
        await asyncio.to_thread(ended.wait)
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    with engine:
        thread.start()
        assert started.wait(20)
        yield Served(engine, ready[0])
        ended.set()
        thread.join()
