"""The routes: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.

The engine computes in its own thread, bodies are read in a few others; what the engine says comes
to the event loop through one queue a request. A client that goes away ends its request in the
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvtier.errors import KvtierError
from kvtier_engine.engine import Engine
from kvtier_engine.errors import EngineClosed, QueueFull
from kvtier_engine.schedule.request import Delta
from kvtier_engine.server.answers import DONE, Wording, error_event, error_response
from kvtier_engine.server.bodies import Asked, Bodies
from kvtier_engine.server.body import BodyReader, Held
from kvtier_engine.server.errors import UnknownModel
from kvtier_engine.server.http import (
    Refusal,
    Refused,
    Stream,
    error_content,
    json_response,
    unless_gone,
)
from kvtier_engine.server.limits import Limits
from kvtier_engine.server.listening import listening
from kvtier_engine.server.metrics import metrics_text
from kvtier_engine.server.pulse import Pulse
from kvtier_engine.server.told import Told

__all__ = ["App", "application", "serving"]

#: A tokenizer computes without the interpreter's lock; more threads than these starve the engine.
_ENCODING_THREADS = 2


class App:
    """One engine, under the name of its model. Belongs to one event loop."""

    def __init__(self, engine: Engine, *, name: str = "", limits: Limits | None = None) -> None:
        self._engine = engine
        self.name = name or engine.model.name
        self.limits = limits or Limits()
        pool = engine.pool
        self._bodies = Bodies(
            model=self.name,
            tokenizer=engine.model.tokenizer,
            room_tokens=min(
                engine.model.network.config.context_tokens, pool.pages * pool.form.page_tokens
            ),
        )
        self._encoder = ThreadPoolExecutor(_ENCODING_THREADS, thread_name_prefix="kvtier-encode")
        self._encodings = 0
        self._reader = BodyReader(self.limits)
        self._pulse = Pulse(engine, self.limits.stall_seconds_max)
        self._told: set[Told] = set()
        self._counts = Counter(
            requests_cancelled=0, requests_done=0, requests_failed=0, requests_refused=0
        )
        self._started = _now()
        self._end: EngineClosed | None = None

    @property
    def asgi(self) -> Starlette:
        """Answers every request; what is wrong with it is in the answer."""
        return application(
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        )

    async def watch(self) -> None:
        """Looks after the engine, until it is cancelled."""
        await self._pulse.watch()

    def end(self) -> None:
        """Ends those who wait for the engine, and whoever comes, with EngineClosed."""
        self._end = EngineClosed("the server is ending", remedy="ask again when it is back")
        for told in list(self._told):
            told.end_with(self._end)

    async def close(self) -> None:
        """Waits for the bodies that are read now; each is bounded."""
        await asyncio.to_thread(self._encoder.shutdown, cancel_futures=True)

    async def _models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._model]})

    async def _one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self.name:
            asked = request.path_params["name"][:80]
            return error_response(
                UnknownModel(f"no model {asked!r}", remedy=f"ask for {self.name!r}")
            )
        return json_response(self._model)

    @property
    def _model(self) -> dict[str, object]:
        return {
            "id": self.name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvtier",
        }

    async def _metrics(self, _: Request) -> Response:
        age = round(self._pulse.look(), 3)
        stats = self._engine.stats()
        refused = stats["requests_refused"] + self._counts["requests_refused"]
        counts = {**self._counts, "requests_refused": refused, "step_age_seconds": age}
        return PlainTextResponse(metrics_text(stats | counts))

    async def _health(self, _: Request) -> Response:
        status = "ok"
        if self._end is not None or self._engine.is_closed:
            status = "closed"
        elif self._pulse.is_stalled:
            status = "stalled"
        return json_response({"status": status}, 200 if status == "ok" else 503)

    async def _completion(self, request: Request) -> Response:
        return await self._post(request, self._bodies.completion, is_chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._post(request, self._bodies.chat, is_chat=True)

    async def _post(
        self, request: Request, reading: Callable[[bytes], Asked], *, is_chat: bool
    ) -> Response:
        try:
            async with self._reader.hold(request) as held:
                asked = await unless_gone(request, self._read(reading, bytes(held.body)))
                return await self._serve(request, asked, held, is_chat=is_chat)
        except KvtierError as error:
            return error_response(error)
        except Refused as error:
            return Refusal(error, self.limits)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it

    async def _read(self, reading: Callable[[bytes], Asked], body: bytes) -> Asked:
        """In another thread: an event loop that makes tokens answers nobody. Raises KvtierError."""
        self._check_open()
        waiting, many = self._engine.stats()["requests_waiting"], self.limits.encodings_max
        if waiting >= self._engine.settings.queue_requests_max or self._encodings >= many:
            self._counts["requests_refused"] += 1
            raise QueueFull(
                f"{waiting} requests wait already, and {self._encodings} to be read",
                remedy="ask again in some seconds",
            )
        self._encodings += 1
        loop, future = asyncio.get_running_loop(), self._encoder.submit(reading, body)
        # One that a client gave up counts until the thread is done with it.
        future.add_done_callback(lambda _: _soon(loop, self._encoded))
        return await asyncio.wrap_future(future)

    def _encoded(self) -> None:
        self._encodings -= 1

    def _check_open(self) -> None:
        if self._end is not None:
            raise self._end

    async def _serve(
        self, request: Request, asked: Asked, held: Held, *, is_chat: bool
    ) -> Response:
        """Raises KvtierError while nothing has been sent, ClientDisconnect."""
        self._check_open()
        wording = Wording(
            is_chat=is_chat,
            with_usage=asked.is_stream and asked.with_usage,
            identifier=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=_now(),
            model=self.name,
            tokenizer=self._engine.model.tokenizer,
        )
        told = Told(self._counts)
        handle = self._engine.submit(asked.request, sink=told.put)
        self._told.add(told)

        def ended() -> None:
            self._told.discard(told)
            self._engine.cancel(handle)
            held.give_back()

        if asked.is_stream:
            held.is_kept = True
            return Stream(_events(wording, told), ended)
        try:
            return json_response(wording.whole(await unless_gone(request, told.end())))
        finally:
            ended()


async def _events(wording: Wording, told: Told) -> AsyncGenerator[str, None]:
    if opening := wording.opening():
        yield opening
    while isinstance(outcome := await told.next(), Delta):
        if outcome.text or outcome.logprob:
            yield wording.token(outcome)
    if isinstance(outcome, KvtierError):
        yield error_event(outcome)
        return
    yield wording.ending(outcome)
    if wording.with_usage:
        yield wording.usage(outcome)
    yield DONE


def application(*routes: Route) -> Starlette:
    """These routes, with every error in OpenAI's shape. A defect is 500 without details, and is
    logged by uvicorn.
    """
    handlers = {HTTPException: _not_routed, Exception: _broken}
    made = Starlette(routes=routes, exception_handlers=handlers)
    made.router.redirect_slashes = False
    return made


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for these alone"
    is_known = error.status_code == 405
    content = error_content(
        f"no {request.method} {request.url.path}",
        "invalid_request_error",
        "method_not_allowed" if is_known else "not_found",
    )
    allowed = sorted((error.headers or {}).get("Allow", "").split(", "))
    headers = {"allow": ", ".join(allowed)} if is_known else {}
    return json_response(content, error.status_code, headers)


async def _broken(_: Request, error: Exception) -> Response:
    refused = Refused(500, "internal_error", "the server failed; its log says why")
    return json_response(refused.content, refused.status, refused.headers)


@contextlib.asynccontextmanager
async def serving(
    app: App, sockets: Sequence[socket.socket]
) -> AsyncIterator[list[tuple[str, int]]]:
    """Serves on these sockets, and says where. At the end nobody is let in, those who wait are
    told so and given their time, and nothing is left. Raises as `listening`.
    """
    watching = asyncio.ensure_future(app.watch())
    try:
        async with listening(app.asgi, app.limits, sockets, ending=app.end) as addresses:
            yield addresses
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        await app.close()


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody counts any more
        loop.call_soon_threadsafe(call)


def _now() -> int:
    """Seconds since 1970, as OpenAI dates things."""
    return int(datetime.now(UTC).timestamp())
