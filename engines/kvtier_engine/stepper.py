"""One step of the engine: plan, check, compute, choose, commit; and how a request ends.

Promise: what goes wrong with one request ends that request alone, with an error of its own. Only
the engine's thread; `counts` and lengths may be read from others.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from kvtier.client.device import DevicePool, NoopTracker, TagTracker, Tracker
from kvtier.errors import KvtierError
from kvtier_engine.attention.choice import attention_for
from kvtier_engine.cache.radix import RadixCache
from kvtier_engine.cache.tiers import KvtierTiers
from kvtier_engine.errors import (
    EngineInconsistent,
    KvTagMismatch,
    RequestCancelled,
    RequestFailed,
)
from kvtier_engine.handle import Handle
from kvtier_engine.model.llama import Llama
from kvtier_engine.sampling import Choice, choose
from kvtier_engine.schedule.request import Completion, Delta, TokenLogprob
from kvtier_engine.schedule.runner import ModelRunner
from kvtier_engine.schedule.scheduler import Decode, Prefill, Scheduler
from kvtier_engine.schedule.sequence import Sequence
from kvtier_engine.schedule.states import Event, State
from kvtier_engine.settings import EngineSettings, Integrity

__all__ = ["Job", "Stepper"]


class Job:
    """A request that was taken: its sequence, who is told, and what was noted on the way."""

    def __init__(self, sequence: Sequence, handle: Handle) -> None:
        self.sequence = sequence
        self.handle = handle
        self.logprobs: list[TokenLogprob] = []
        self.submitted = time.monotonic()
        self.first_token_seconds: float | None = None


class Stepper:
    """The jobs of one engine, its pages, its prefix tree and its network."""

    def __init__(
        self,
        network: Llama,
        pool: DevicePool,
        tiers: KvtierTiers | None,
        settings: EngineSettings,
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self.radix = RadixCache(pool.form.page_tokens)
        self.scheduler = Scheduler(pool, self.radix, tiers, settings.running_requests_max)
        self._runner = ModelRunner(network, pool, attention_for(pool))
        tags = settings.integrity is Integrity.TAGS
        self._tracker: Tracker = TagTracker(pool) if tags else NoopTracker()
        self.jobs: dict[int, Job] = {}
        self.counts: Counter[str] = Counter()

    def take(self, job: Job) -> None:
        """A request joins the queue."""
        self.jobs[job.sequence.number] = job
        self.scheduler.waiting.append(job.sequence)
        self.counts["requests"] += 1

    def give_up(self, numbers: Iterable[int]) -> None:
        """Ends those of these requests that are here with RequestCancelled."""
        for job in [self.jobs[number] for number in numbers if number in self.jobs]:
            self._fail(
                job.sequence, RequestCancelled("the request was cancelled", remedy="ask it again")
            )

    def end_all(self, error: KvtierError) -> None:
        for job in list(self.jobs.values()):
            self._fail(job.sequence, error)

    def step(self) -> bool:
        """One pass over the network, if there is one to make. False: nothing to do for now."""
        self._take_loads()
        plan = self.scheduler.plan()
        try:
            if isinstance(plan, Prefill):
                self._prefill(plan)
            elif isinstance(plan, Decode):
                self._decode(plan)
        except RuntimeError as error:  # what torch raises, out of memory among it
            here = (plan.sequence,) if isinstance(plan, Prefill) else plan.sequences if plan else ()
            self.counts["passes_failed"] += 1
            for sequence in here:
                if sequence.state is not State.FINISHED:
                    self._fail(sequence, _failed(f"the pass failed: {error}"))
        return plan is not None

    def wait_for_loads(self, seconds: float) -> None:
        """Until a load that somebody waits for is done, or that long."""
        for sequence in self.scheduler.running:
            if sequence.loading is not None:
                with contextlib.suppress(KvtierError):  # the next step takes up how it ended
                    sequence.loading.transfer.wait(seconds)
                return
        time.sleep(seconds if self.scheduler.waiting else 0.0)

    def check_idle(self) -> None:
        """See Engine.check_idle."""
        if self._tiers is not None:
            self._tiers.poll()
        self._pool.check()
        cached = self.radix.check()
        shared = sum(self._pool.references(page) != 1 for page in cached)
        held, locks = self._pool.occupancy.held, self.radix.locks
        if self.jobs or locks or shared or held != len(cached):
            raise EngineInconsistent(
                f"{len(self.jobs)} requests, {locks} locks, {held} pages held, {len(cached)} in "
                f"the tree, {shared} of them held by others too",
                remedy="report this: a defect",
            )

    def _take_loads(self) -> None:
        if self._tiers is None:
            return
        self._tiers.poll()
        for sequence in list(self.scheduler.running):
            loading = sequence.loading
            if loading is None:
                continue
            result = self._tiers.loaded(loading.transfer, len(loading.places))
            if result is not None:
                sequence.take_loaded(result)

    def _prefill(self, plan: Prefill) -> None:
        sequence = plan.sequence
        if not self._sound([sequence]):
            return
        logits = self._runner.prefill(plan)
        self.counts["prefill_passes"] += 1
        self.counts["prefill_pages"] += plan.end - plan.first
        if not sequence.take_computed(plan.first, plan.end):
            return
        assert logits is not None
        sequence.fire(Event.COMPUTED)
        self.scheduler.share_prefix(sequence)
        self._offload(sequence)
        (choice,) = choose(logits, [sequence.chooser])
        self._advance(sequence, choice)

    def _decode(self, plan: Decode) -> None:
        sequences = self._sound(plan.sequences)
        if not sequences:
            return
        logits = self._runner.decode(sequences)
        self.counts["decode_passes"] += 1
        self.counts["decode_tokens"] += len(sequences)
        choices = choose(logits, [sequence.chooser for sequence in sequences])
        for sequence, choice in zip(sequences, choices, strict=True):
            self._advance(sequence, choice)

    def _sound(self, sequences: SequenceOf[Sequence]) -> list[Sequence]:
        """Those whose tables name the pages that they were given; the others end here."""
        verdicts = self._tracker.verify([sequence.table for sequence in sequences]).tolist()
        for sequence, is_sound in zip(sequences, verdicts, strict=True):
            if not is_sound:
                self.counts["integrity_failures"] += 1
                self._fail(sequence, _mismatch())
        return [s for s, is_sound in zip(sequences, verdicts, strict=True) if is_sound]

    def _advance(self, sequence: Sequence, choice: Choice) -> None:
        """Commits one chosen token: the only place where a request grows."""
        if choice.token is None:
            self._fail(sequence, _failed("the model computed logits that are no numbers"))
            return
        job = self.jobs[sequence.number]
        if job.first_token_seconds is None:
            job.first_token_seconds = time.monotonic() - job.submitted
        sequence.tokens.append(choice.token)
        if choice.logprob is not None:
            job.logprobs.append(choice.logprob)
        text = sequence.output.add(choice.token)
        job.handle.tell(Delta(text=text, token=choice.token, logprob=choice.logprob))
        if sequence.output.reason is not None:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        sequence, output = job.sequence, job.sequence.output
        assert output.reason is not None
        self._drop(sequence)
        self.counts["requests_done"] += 1
        cached = sequence.cached
        for tier in ("device", "host", "nvme", "shared"):
            self.counts[f"cached_{tier}_tokens"] += getattr(cached, tier)
        job.handle.tell(
            Completion(
                text=output.text,
                tokens=tuple(output.tokens),
                reason=output.reason,
                prompt_tokens=sequence.prompt_tokens,
                cached=cached,
                logprobs=tuple(job.logprobs),
                first_token_seconds=job.first_token_seconds or 0.0,
                preemptions=sequence.preemptions,
            )
        )

    def _fail(self, sequence: Sequence, error: KvtierError) -> None:
        job = self.jobs[sequence.number]
        self._drop(sequence)
        self.counts["requests_failed"] += 1
        job.handle.tell(error)

    def _drop(self, sequence: Sequence) -> None:
        del self.jobs[sequence.number]
        self.counts["foreign_pages"] += len(self.scheduler.remove(sequence))

    def _offload(self, sequence: Sequence) -> None:
        """What was computed here of the pages that others may use goes to kvtier."""
        if self._tiers is None:
            return
        keys = self._tiers.keys(sequence.request.prompt)
        ids = sequence.table.ids
        for start, end in _runs(sorted(sequence.computed), sequence.shareable_pages):
            self._tiers.offload(keys[start:end], ids[start:end], sequence.request)


def _runs(places: SequenceOf[int], limit: int) -> Iterator[tuple[int, int]]:
    """Runs (start, end) of neighbours among ascending `places` below `limit`."""
    start = previous = None
    for place in [place for place in places if place < limit]:
        if previous is None or place != previous + 1:
            if start is not None and previous is not None:
                yield start, previous + 1
            start = place
        previous = place
    if start is not None and previous is not None:
        yield start, previous + 1


def _failed(what: str) -> RequestFailed:
    return RequestFailed(what, remedy="ask again; if it happens again look at the model's weights")


def _mismatch() -> KvTagMismatch:
    return KvTagMismatch(
        "a page of this request was given to somebody else, or its table was changed",
        remedy="ask again; report this: a defect, or memory that was damaged",
    )
