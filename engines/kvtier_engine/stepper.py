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
from functools import partial

import torch

from kvtier.client.device import DevicePool, NoopTracker, PageNotHeld, TagTracker, Tracker
from kvtier.errors import KvtierError
from kvtier_engine.attention.choice import attention_for
from kvtier_engine.cache.tiers import KvtierTiers
from kvtier_engine.errors import (
    EngineInconsistent,
    KvTagMismatch,
    RequestCancelled,
    RequestFailed,
)
from kvtier_engine.guard import attempted
from kvtier_engine.handle import Handle
from kvtier_engine.model.llama import Llama
from kvtier_engine.sampling import Choice, choose
from kvtier_engine.schedule.request import Completion, Delta, EndReason, TokenLogprob
from kvtier_engine.schedule.runner import ModelRunner
from kvtier_engine.schedule.scheduler import Decode, Prefill, Scheduler
from kvtier_engine.schedule.sequence import Sequence
from kvtier_engine.schedule.states import Event
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
        self.scheduler = Scheduler(pool, tiers, settings.running_requests_max)
        self.radix = self.scheduler.radix
        self._runner = ModelRunner(network, pool, attention_for(pool, network.dtype))
        self._trackers: dict[Integrity, Tracker] = {
            Integrity.TAGS: TagTracker(pool),
            Integrity.OFF: NoopTracker(),
        }
        self.set_integrity(settings.integrity)
        self.jobs: dict[int, Job] = {}
        self.counts: Counter[str] = Counter()

    def set_integrity(self, integrity: Integrity) -> None:
        """What the steps from now on check."""
        self._tracker = self._trackers[integrity]

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
        """Every one is told, also when ending another goes wrong; that is raised afterwards."""
        with contextlib.ExitStack() as stack:
            for job in reversed(self.jobs.values()):
                stack.callback(self._end, job, error)

    def step(self) -> bool:
        """One pass over the network, if there is one to make. False: nothing to do for now.

        Raises EngineInconsistent; whatever else goes wrong ends the requests that it is of.
        """
        self._take_loads()
        plan = self._plan()
        if plan is None:
            return False
        here: SequenceOf[Sequence]
        if isinstance(plan, Prefill):
            here, work = [plan.sequence], partial(self._prefill, plan)
        else:
            here, work = plan.sequences, partial(self._decode, plan)
        error = attempted(work, "pass")
        if isinstance(error, Exception):
            self.counts["passes_failed"] += 1
            for sequence in here:
                self._fail_by(sequence, error, "the pass over the network failed")
        return True

    def wait_for_loads(self, seconds: float) -> None:
        """Until a transfer is done that somebody may wait for, or that long."""
        if self.jobs and (self._tiers is None or not self._tiers.wait(seconds)):
            time.sleep(seconds)

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
            if loading is not None:
                result = self._tiers.loaded(loading.transfer, len(loading.places))
                if result is not None:
                    sequence.take_loaded(result)

    def _plan(self) -> Prefill | Decode | None:
        """What goes wrong in planning ends the request that was planned for; the others go on."""
        while True:
            plan = attempted(self.scheduler.plan, "plan")
            if not isinstance(plan, Exception):
                return plan
            sequence = self.scheduler.busy_with
            if sequence is None:
                raise EngineInconsistent(
                    "no plan, and for nobody in particular", remedy="report this: a defect"
                ) from plan
            self._fail_by(sequence, plan, "its pages could not be planned")

    def _prefill(self, plan: Prefill) -> None:
        sequence = plan.sequence
        if not self._sound([sequence]):
            return
        logits = self._runner.prefill(plan)
        self.counts["prefill_passes"] += 1
        self.counts["prefill_pages"] += plan.end - plan.first
        for page in sequence.table.ids[plan.first : plan.end]:
            sequence.extremes += self._pool.extremes(page)
        if not sequence.take_computed(plan.first, plan.end):
            return
        if logits is None:
            raise EngineInconsistent("a prompt without logits", remedy="report this: a defect")
        (choice,) = choose(logits, [sequence.chooser])
        # Nobody else sees pages before it is known that they hold numbers.
        if choice.token is None or not bool(torch.stack(sequence.extremes).isfinite().all()):
            self._fail_no_numbers(sequence)
            return
        sequence.fire(Event.COMPUTED)
        self._publish(sequence)
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
        """One chosen token; what goes wrong with it ends this request alone."""
        if choice.token is None:
            self._fail_no_numbers(sequence)
        elif isinstance(attempted(partial(self._commit, sequence, choice), "token"), Exception):
            self._fail(sequence, _failed("a chosen token could not be made into text"))

    def _commit(self, sequence: Sequence, choice: Choice) -> None:
        """The only place where a request grows."""
        if choice.token is None:
            raise EngineInconsistent("a choice of nothing", remedy="report this: a defect")
        job = self.jobs[sequence.number]
        if job.first_token_seconds is None:
            job.first_token_seconds = time.monotonic() - job.submitted
        sequence.tokens.append(choice.token)
        if choice.logprob is not None:
            job.logprobs.append(choice.logprob)
        text = sequence.output.add(choice.token)
        job.handle.tell(Delta(text=text, token=choice.token, logprob=choice.logprob))
        if sequence.output.reason is not None:
            self._finish(job, sequence.output.reason)

    def _finish(self, job: Job, reason: EndReason) -> None:
        sequence, output, cached = job.sequence, job.sequence.output, job.sequence.cached
        self.counts["requests_done"] += 1
        for tier in ("device", "host", "nvme", "shared"):
            self.counts[f"cached_{tier}_tokens"] += getattr(cached, tier)
        self._end(
            job,
            Completion(
                text=output.text,
                tokens=tuple(output.tokens),
                reason=reason,
                prompt_tokens=sequence.prompt_tokens,
                cached=cached,
                logprobs=tuple(job.logprobs),
                first_token_seconds=job.first_token_seconds or 0.0,
                preemptions=sequence.preemptions,
            ),
        )

    def _fail(self, sequence: Sequence, error: KvtierError) -> None:
        """Does nothing for a request that has ended."""
        job = self.jobs.get(sequence.number)
        if job is not None:
            self.counts["requests_failed"] += 1
            self._end(job, error)

    def _fail_by(self, sequence: Sequence, error: Exception, what: str) -> None:
        """`what` is all that the one who asked is told: an error's own words may be of this
        machine, and are in the log.
        """
        if isinstance(error, PageNotHeld):
            self.counts["integrity_failures"] += 1
            self._fail(sequence, _mismatch())
        else:
            self._fail(sequence, _failed(what))

    def _fail_no_numbers(self, sequence: Sequence) -> None:
        """NaN or infinite. What others could find of this request's pages may be the reason."""
        self.counts["nonfinite"] += 1
        self.scheduler.unshare(sequence, self._is_suspect)
        self._fail(sequence, _failed("the model computed values that are no numbers"))

    def _is_suspect(self, sequence: Sequence, place: int) -> bool:
        """A page of its own computing, or one that holds what is no number."""
        if place in sequence.computed:
            return True
        extremes = self._pool.extremes(sequence.table.ids[place])
        return not bool(torch.stack(extremes).isfinite().all())

    def _end(self, job: Job, outcome: Completion | KvtierError) -> None:
        """Whatever goes wrong in giving back what it had: the one who asked is told."""
        try:
            del self.jobs[job.sequence.number]
            foreign = attempted(partial(self.scheduler.remove, job.sequence), "removal")
            if not isinstance(foreign, Exception):
                self.counts["foreign_pages"] += len(foreign)
        finally:
            job.handle.tell(outcome)

    def _publish(self, sequence: Sequence) -> None:
        """The prompt's pages are shared; what was computed here of them goes to kvtier."""
        self.scheduler.share_prefix(sequence)
        if self._tiers is None:
            return
        keys = sequence.keys(self._tiers.keys)
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
