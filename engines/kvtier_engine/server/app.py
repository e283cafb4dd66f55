"""The routes: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.

The engine computes in its own thread; what it says comes to the event loop through one queue a
request. A client that goes away ends its request in the engine.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from datetime import UTC, datetime

from kvtier.errors import KvtierError
from kvtier_engine.engine import Engine
from kvtier_engine.handle import Outcome
from kvtier_engine.schedule.request import Completion, Delta
from kvtier_engine.server.answers import DONE, Wording, error_answer, error_event
from kvtier_engine.server.bodies import Asked, read_chat, read_completion, read_object
from kvtier_engine.server.http import Answer, HttpRequest, Stream, serve_connection

__all__ = ["App", "listen"]

_POSTS = ("/v1/completions", "/v1/chat/completions")


class App:
    """One engine, under the name of its model. Belongs to one event loop."""

    def __init__(self, engine: Engine, *, name: str = "") -> None:
        self._engine = engine
        self.name = name or engine.model.name
        self._started = _now()

    async def handle(self, request: HttpRequest) -> Answer | Stream:
        """Answers every request; what is wrong with it is in the answer."""
        route = (request.method, request.path)
        try:
            if route == ("POST", "/v1/chat/completions"):
                asked = read_chat(read_object(request.body), self._engine.model.tokenizer)
                return await self._serve(asked, is_chat=True)
            if route == ("POST", "/v1/completions"):
                asked = read_completion(read_object(request.body), self._engine.model.tokenizer)
                return await self._serve(asked, is_chat=False)
        except KvtierError as error:
            return error_answer(error)
        if request.method == "GET":
            return self._get(request.path)
        return _refused(
            405 if request.path in _POSTS else 404, f"no {request.method} {request.path}"
        )

    def _get(self, path: str) -> Answer:
        if path == "/health":
            closed = self._engine.is_closed
            status = "closed" if closed else "ok"
            return Answer(status=503 if closed else 200, content={"status": status})
        if path == "/metrics":
            return Answer(content=_metrics(self._engine.stats()))
        model = {"id": self.name, "object": "model", "created": self._started, "owned_by": "kvtier"}
        if path == "/v1/models":
            return Answer(content={"object": "list", "data": [model]})
        if path == f"/v1/models/{self.name}":
            return Answer(content=model)
        return _refused(405 if path in _POSTS else 404, f"no GET {path}")

    async def _serve(self, asked: Asked, *, is_chat: bool) -> Answer | Stream:
        """Raises KvtierError while nothing has been sent."""
        if asked.model != self.name:
            return _refused(
                404, f"no model {asked.model!r}, this is {self.name!r}", "model_not_found"
            )
        wording = Wording(
            is_chat=is_chat,
            identifier=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=_now(),
            model=self.name,
            tokenizer=self._engine.model.tokenizer,
        )
        told = _Told()
        handle = self._engine.submit(asked.request, sink=told.put)
        if asked.is_stream:
            return Stream(
                events=_events(asked, wording, told), ended=lambda: self._engine.cancel(handle)
            )
        try:
            return Answer(content=wording.whole(await told.end()))
        finally:
            self._engine.cancel(handle)


class _Told:
    """What the engine's thread says, for the loop in which this was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Outcome] = asyncio.Queue()

    def put(self, outcome: Outcome) -> None:
        """Called in the engine's thread. After the loop has ended nobody listens."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, outcome)

    async def next(self) -> Outcome:
        return await self._queue.get()

    async def end(self) -> Completion:
        """Skips the deltas. Raises the request's error."""
        while isinstance(outcome := await self._queue.get(), Delta):
            pass
        if isinstance(outcome, KvtierError):
            raise outcome
        return outcome


async def _events(asked: Asked, wording: Wording, told: _Told) -> AsyncGenerator[str, None]:
    if opening := wording.opening():
        yield opening
    while isinstance(outcome := await told.next(), Delta):
        if outcome.text or outcome.logprob:
            yield wording.token(outcome)
    if isinstance(outcome, KvtierError):
        yield error_event(outcome)
        return
    yield wording.ending(outcome)
    if asked.with_usage:
        yield wording.usage(outcome)
    yield DONE


async def listen(app: App, host: str, port: int) -> asyncio.Server:
    """Serves on host:port (0: any free one) until the server is closed."""
    return await asyncio.start_server(
        lambda reader, writer: serve_connection(reader, writer, app.handle), host, port
    )


def _refused(status: int, message: str, code: str = "not_found") -> Answer:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return Answer(status=status, content={"error": error})


def _metrics(stats: dict[str, int]) -> str:
    """Prometheus' text form: numbers of now are gauges, the others counters."""
    lines = []
    for name, value in sorted(stats.items()):
        is_gauge = name.startswith(("pages", "requests_waiting", "requests_running"))
        full = f"kvtier_engine_{name}" if is_gauge else f"kvtier_engine_{name}_total"
        lines += [f"# TYPE {full} {'gauge' if is_gauge else 'counter'}", f"{full} {value}"]
    return "\n".join(lines) + "\n"


def _now() -> int:
    """Seconds since 1970, as OpenAI dates things."""
    return int(datetime.now(UTC).timestamp())
