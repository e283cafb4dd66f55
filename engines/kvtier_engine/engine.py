"""The engine: requests in, tokens out, over one pool of pages with kvtier below it.

Promise: every request that was taken ends, with a completion or with one error of its own; what
goes wrong with one request ends that request alone. When nothing is to be done, every page is free
or is named by the prefix tree, which `check_idle` counts.

Threads: `submit`, `cancel` and `stats` from any. `step`, `wait_for_loads` and `check_idle` belong
to one thread: the loop's after `start`, the caller's without it. The lock guards the inbox alone
and is never held while anything is computed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from types import TracebackType

from kvtier.client.device import DevicePool
from kvtier.errors import LayoutError
from kvtier_engine.cache.tiers import KvtierTiers
from kvtier_engine.errors import EngineClosed, EngineStarted, InvalidRequest, QueueFull
from kvtier_engine.handle import Handle, Sink
from kvtier_engine.inspection import Inspection
from kvtier_engine.model.load import LoadedModel
from kvtier_engine.schedule.output import Output
from kvtier_engine.schedule.request import Request
from kvtier_engine.schedule.sequence import Sequence
from kvtier_engine.settings import EngineSettings, KvCacheDtype, layout_of
from kvtier_engine.stepper import Job, Stepper

__all__ = ["CLOSE_SECONDS_MAX", "Engine"]

log = logging.getLogger(__name__)

#: A step that is under way is waited for; one that hangs is not.
CLOSE_SECONDS_MAX = 10.0
#: How long an idle loop waits for a load before it looks for new requests again.
_LOAD_WAIT_S = 0.002


class Engine:
    """Over `pool`, whose layout is what `layout_of` makes for this model and these settings (else
    LayoutError). Owns neither pool nor tiers, which are closed after it.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: DevicePool,
        *,
        tiers: KvtierTiers | None = None,
        settings: EngineSettings | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.settings = settings = settings or EngineSettings()
        wanted = layout_of(
            model,
            page_tokens=pool.layout.page_tokens,
            chunk_pages=settings.chunk_pages,
            kv_cache=KvCacheDtype.FP8_E4M3 if pool.form.is_fp8 else KvCacheDtype.AS_COMPUTED,
        )
        difference = pool.layout.difference(wanted)
        if difference is not None:
            raise LayoutError(
                f"the pool's layout is not that of this model: {difference}",
                remedy="make the pool with layout_of(model, ...), with this engine's chunk_pages",
            )
        self._tiers = tiers
        self._stepper = Stepper(model.network, pool, tiers, settings)
        self.inside = Inspection(self._stepper)
        self._wake = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._given_up: set[int] = set()
        self._numbers = 0
        self._refused = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def submit(self, request: Request, sink: Sink | None = None) -> Handle:
        """Takes a request. Raises InvalidRequest, QueueFull, EngineClosed; nothing is started then.

        `sink` is called in the engine's thread and must not block. What it raises is logged; it is
        told the end alone from then on.
        """
        room = self._checked_room(request)
        sampling = request.sampling
        tokens_max = room if sampling.max_tokens is None else sampling.max_tokens
        output = Output(
            self.model.tokenizer.stream(), sampling, self.model.network.config.end_ids, tokens_max
        )
        with self._wake:
            self._check_open()
            if self._waiting >= self.settings.queue_requests_max:
                self._refused += 1
                raise QueueFull(
                    f"{self.settings.queue_requests_max} requests wait already",
                    remedy="ask again in some seconds",
                )
            self._numbers += 1
            handle = Handle(self._numbers, sink)
            sequence = Sequence(
                self._numbers, request, output, self.pool, chunk_pages=self.settings.chunk_pages
            )
            self._inbox.append(Job(sequence, handle))
            self._wake.notify()
        return handle

    def cancel(self, handle: Handle) -> None:
        """Ends a request with RequestCancelled at the next step; no error if it has ended."""
        with self._wake:
            self._given_up.add(handle.number)
            self._wake.notify()

    def step(self) -> bool:
        """Takes what came in, and makes one pass. False: nothing to do for now."""
        with self._wake:
            came, given_up = list(self._inbox), set(self._given_up)
            self._inbox.clear()
            self._given_up.clear()
            for job in came:  # under the lock, so that no job is in neither place
                self._stepper.take(job)
        self._stepper.give_up(given_up)
        return self._stepper.step()

    @property
    def has_work(self) -> bool:
        """A request waits or runs."""
        with self._wake:
            return bool(self._inbox or self._stepper.jobs)

    def run_until_idle(self) -> None:
        """Steps in this thread until no request is left (instead of `start`)."""
        while self.has_work:
            if not self.step():
                self.wait_for_loads(_LOAD_WAIT_S)

    def wait_for_loads(self, seconds: float) -> None:
        """For who steps, after a step that had nothing to do: returns when a transfer has ended on
        which a request may wait, or after that long; at once without requests.
        """
        self._stepper.wait_for_loads(seconds)

    def start(self) -> Engine:
        """Steps in a thread of its own from now on. Raises EngineClosed, EngineStarted."""
        with self._wake:
            self._check_open()
            if self._thread is not None:
                raise EngineStarted("the engine runs already", remedy="start it once")
            self._thread = threading.Thread(target=self._loop, name="kvtier-engine", daemon=True)
        self._thread.start()
        return self

    def close(self, timeout_seconds: float = CLOSE_SECONDS_MAX) -> bool:
        """Ends every request that is left with EngineClosed, and the loop. Twice is no error.

        False: the loop is in the middle of a step that does not end in `timeout_seconds`. It is
        left alone and ends behind that step; until then pool and model are in use. Those who wait
        for a handle are told at once; a sink, which might be what the step waits for, is told then.
        """
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_seconds)
            if thread.is_alive():
                log.error("engine.stuck", extra={"seconds": timeout_seconds})
                self._tell_those_who_wait()
                return False
            self._thread = None
        self._end_all()
        return True

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is there now. Advice: not all at one moment."""
        stepper = self._stepper
        # Copied whole, each in one step: the engine's thread adds names meanwhile.
        counts = dict(stepper.counts) | dict(stepper.scheduler.counts)
        counts |= dict(self._tiers.counts) if self._tiers else {}
        with self._wake:
            counts["requests_refused"] = self._refused
            counts["requests_waiting"] = self._waiting
        counts["requests_running"] = len(stepper.scheduler.running)
        counts["pages"] = self.pool.pages
        counts["pages_free"] = self.pool.free_pages
        counts["pages_cached"] = stepper.radix.pages
        counts["stale_prefix_pages"] = stepper.radix.stale_pages
        return counts

    def check_idle(self) -> None:
        """Without requests: every page is free, or held by the prefix tree alone.

        Raises EngineInconsistent or PoolInconsistent.
        """
        self._stepper.check_idle()

    def _loop(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._inbox or self._given_up or self._stepper.jobs):
                        if self._is_closed:
                            return
                        self._wake.wait()
                    if self._is_closed:
                        return
                if not self.step():
                    self.wait_for_loads(_LOAD_WAIT_S)
        finally:
            # Also after a defect: nobody may wait for an engine that has stopped.
            with self._wake:
                self._is_closed = True
            self._end_all()

    def _end_all(self) -> None:
        with self._wake:
            while self._inbox:
                self._stepper.take(self._inbox.popleft())
        self._stepper.end_all(_closed())

    def _tell_those_who_wait(self) -> None:
        """Of an engine whose thread stands: nothing of theirs is touched but the handle."""
        with self._wake:
            jobs = [*self._inbox, *self._stepper.jobs.values()]
        for job in jobs:
            if not job.handle.has_sink:
                job.handle.tell(_closed())

    @property
    def _waiting(self) -> int:
        return len(self._inbox) + len(self._stepper.scheduler.waiting)

    def _check_open(self) -> None:
        if self._is_closed:
            raise _closed()

    def _checked_room(self, request: Request) -> int:
        """How many tokens may be added to this prompt. Raises InvalidRequest."""
        config, form = self.model.network.config, self.pool.form
        room = min(config.context_tokens, self.pool.pages * form.page_tokens)
        prompt, wanted = len(request.prompt), request.sampling.max_tokens or 1
        if not prompt:
            raise InvalidRequest("an empty prompt", remedy="send at least one token")
        if prompt + wanted > room:
            raise InvalidRequest(
                f"{prompt} prompt tokens and {wanted} more do not fit into {room} "
                f"(context {config.context_tokens}, pool {self.pool.pages * form.page_tokens})",
                remedy="send a shorter prompt, or ask for fewer tokens",
            )
        if not all(0 <= token < config.vocab_size for token in request.prompt):
            raise InvalidRequest(
                f"a token outside 0 .. {config.vocab_size - 1}", remedy="use this model's tokenizer"
            )
        return room - prompt


def _closed() -> EngineClosed:
    return EngineClosed("the engine is closed", remedy="make a new one")
