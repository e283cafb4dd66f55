"""The routes: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.

The engine computes in its own thread, bodies are read in a few others; what the engine says comes
to the event loop through one queue a request. A client that goes away ends its request in the
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from kvtier.errors import KvtierError
from kvtier_engine.engine import Engine
from kvtier_engine.errors import EngineClosed, QueueFull
from kvtier_engine.schedule.request import Delta
from kvtier_engine.server.answers import DONE, Wording, error_answer, error_event
from kvtier_engine.server.bodies import Asked, Bodies
from kvtier_engine.server.http import Answer, HttpRequest, Stream, error_content
from kvtier_engine.server.limits import Limits
from kvtier_engine.server.listener import Listener
from kvtier_engine.server.metrics import metrics_text
from kvtier_engine.server.pulse import Pulse
from kvtier_engine.server.told import Told

__all__ = ["App", "serving"]

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
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
        self._pulse = Pulse(engine, self.limits.stall_seconds_max)
        self._told: set[Told] = set()
        self._counts = Counter(
            requests_cancelled=0, requests_done=0, requests_failed=0, requests_refused=0
        )
        self._started = _now()
        self._end: EngineClosed | None = None

    async def handle(self, request: HttpRequest) -> Answer | Stream:
        """Answers every request; what is wrong with it is in the answer."""
        method = "GET" if request.method == "HEAD" else request.method
        reading = {_CHAT: self._bodies.chat, _COMPLETION: self._bodies.completion}.get(request.path)
        answer = self._get(request.path)
        if reading is None and answer is None:
            return _refused(404, f"no {request.method} {request.path}")
        if reading is not None and method == "POST":
            try:
                asked = await self._read(reading, request.body)
                return await self._serve(asked, is_chat=request.path == _CHAT)
            except KvtierError as error:
                return error_answer(error)
        if answer is not None and method == "GET":
            return answer
        allowed = "POST" if answer is None else "GET, HEAD"
        return _refused(405, f"no {request.method} {request.path}", allow=allowed)

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

    def _get(self, path: str) -> Answer | None:
        """None for what is not there to get."""
        if path == "/health":
            return self._health()
        if path == "/metrics":
            age = round(self._pulse.look(), 3)
            stats = self._engine.stats()
            refused = stats["requests_refused"] + self._counts["requests_refused"]
            counts = {**self._counts, "requests_refused": refused, "step_age_seconds": age}
            return Answer(content=metrics_text(stats | counts))
        model = {"id": self.name, "object": "model", "created": self._started, "owned_by": "kvtier"}
        if path == "/v1/models":
            return Answer(content={"object": "list", "data": [model]})
        return Answer(content=model) if path == f"/v1/models/{self.name}" else None

    def _health(self) -> Answer:
        status = "ok"
        if self._end is not None or self._engine.is_closed:
            status = "closed"
        elif self._pulse.is_stalled:
            status = "stalled"
        return Answer(status=200 if status == "ok" else 503, content={"status": status})

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

    async def _serve(self, asked: Asked, *, is_chat: bool) -> Answer | Stream:
        """Raises KvtierError while nothing has been sent."""
        self._check_open()
        wording = Wording(
            is_chat=is_chat,
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

        if asked.is_stream:
            return Stream(events=_events(asked, wording, told), ended=ended)
        try:
            return Answer(content=wording.whole(await told.end()))
        finally:
            ended()


async def _events(asked: Asked, wording: Wording, told: Told) -> AsyncGenerator[str, None]:
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


@contextlib.asynccontextmanager
async def serving(app: App, host: str, port: int) -> AsyncIterator[tuple[str, int]]:
    """Serves on host:port (0: any free one), and says where. At the end nobody is let in, those
    who wait are told so and given their time, and nothing is left. Raises OSError.
    """
    listener = Listener(app.handle, app.limits)
    address = await listener.start(host, port)
    watching = asyncio.ensure_future(app.watch())
    try:
        yield address
    finally:
        listener.stop_accepting()
        app.end()
        await listener.close()
        watching.cancel()
        await asyncio.wait({watching})
        await app.close()


def _refused(status: int, message: str, *, allow: str = "") -> Answer:
    code = "method_not_allowed" if allow else "not_found"
    content = error_content(message, "invalid_request_error", code)
    return Answer(status=status, content=content, headers={"allow": allow} if allow else {})


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody counts any more
        loop.call_soon_threadsafe(call)


def _now() -> int:
    """Seconds since 1970, as OpenAI dates things."""
    return int(datetime.now(UTC).timestamp())
