"""Who computes next, and with which pages. Decides; computes nothing and waits for nothing.

Rules. Requests are admitted in the order in which they came, with all the pages of their prompt, or
not at all. Prefill passes and decode steps take turns while there is work of both kinds. When a
decoding request needs a page and none is free, unused prefixes are evicted, then the youngest
request that computes is preempted: it goes to the front of the queue with its tokens and without
its pages. A request that was let in fits into the pool alone, so the oldest always goes on. Nothing
is evicted for a request that it would not make room for.

Only the engine's thread.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from kvtier.client.device import DevicePool, PageNotHeld
from kvtier_engine.cache.radix import RadixCache
from kvtier_engine.cache.tiers import KvtierTiers
from kvtier_engine.schedule.sequence import Loading, Sequence
from kvtier_engine.schedule.states import Event, State

__all__ = ["Decode", "Prefill", "Scheduler"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Pages `first` .. `end` - 1 of one sequence."""

    sequence: Sequence
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    sequences: tuple[Sequence, ...]


class Scheduler:
    """The queue, those who run, and the pages they have."""

    def __init__(self, pool: DevicePool, tiers: KvtierTiers | None, running_max: int) -> None:
        self._pool = pool
        self.radix = self._radix = RadixCache(pool.form.page_tokens, self.are_ours)
        self._tiers = tiers
        self._running_max = running_max
        self._page_tokens = pool.form.page_tokens
        self.waiting: deque[Sequence] = deque()
        #: In the order of admission.
        self.running: list[Sequence] = []
        self._was_prefill = False
        #: For whom `plan` works: what it raises is that one's alone. None: nobody's.
        self.busy_with: Sequence | None = None
        #: Grows when anybody gives pages or a lock back, and with what the tree takes.
        self._changes = 0
        #: (request, changes, free pages) of the last that was not admitted.
        self._blocked: tuple[Sequence, int, int] | None = None
        self.counts: Counter[str] = Counter()

    def plan(self) -> Prefill | Decode | None:
        """The next pass; None when all wait for pages or for loads, or nobody is there.

        An error in it is that of the request `busy_with`, which is to be removed before the next.
        """
        self.busy_with = None
        while self.waiting and not self._is_blocked(self.waiting[0]):
            self.busy_with = head = self.waiting[0]
            if not self._admit(head):
                self._blocked = (head, self._changes, self._pool.free_pages)
                break
            self.running.append(self.waiting.popleft())
        self.busy_with = None
        decode = self._decode() if self._was_prefill else None
        plan = decode or self._prefill() or self._decode()
        self._was_prefill = isinstance(plan, Prefill)
        return plan

    def remove(self, sequence: Sequence) -> tuple[int, ...]:
        """Ends it, whatever it does. Pages under a copy stay with the pool until that is done.
        Returns pages of its table that are another's by now.
        """
        sequence.fire(Event.FINISH)
        self._changes += 1
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.loading is not None and self._tiers is not None:
            self._tiers.give_up(sequence.loading.transfer)
            sequence.loading = None
        return sequence.drop_pages()

    def share_prefix(self, sequence: Sequence) -> None:
        """The prompt is computed and was checked: its full pages may be used by others now, and are
        kept. Raises PageNotHeld, and shares nothing, where one is another's by now.
        """
        self._changes += 1
        whole = sequence.shareable_pages
        prefix, pages = sequence.tokens[: whole * self._page_tokens], sequence.table.ids[:whole]
        tags: list[int] = sequence.table.tags[:whole].tolist()
        if not all(self.are_ours(pages, tags)):
            raise PageNotHeld(
                "a page of this prompt is another's by now", remedy="report this: a defect"
            )
        self._prune(prefix)
        taken = self._radix.insert(prefix, pages, tags)
        self._pool.share(taken)
        if sequence.lock is not None:
            sequence.lock.release()
        sequence.lock = self._radix.lock(self._radix.match(prefix))

    def unshare(self, sequence: Sequence, is_suspect: Callable[[Sequence, int], bool]) -> None:
        """Nobody shall find the pages of this prompt any more from the first suspect one on."""
        self._changes += 1
        prefix = sequence.tokens[: sequence.shareable_pages * self._page_tokens]
        named = self._radix.match(prefix).pages
        for place, (page, mine) in enumerate(zip(named, sequence.table.ids, strict=False)):
            if page == mine and is_suspect(sequence, place):
                self._pool.free(self._radix.drop(prefix, place))
                return

    def preempt(self, sequence: Sequence) -> None:
        """One that computes goes to the front of the queue, with its tokens and without its pages.
        Raises EngineInconsistent for one that does not.
        """
        sequence.fire(Event.PREEMPT)
        self._changes += 1
        sequence.drop_pages()
        sequence.preemptions += 1
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.counts["preemptions"] += 1

    def evict(self, count: int) -> int:
        """Gives up to `count` pages of prefixes that nobody uses back to the pool; how many."""
        evicted = self._radix.evict(count)
        self._pool.free(evicted)
        self.counts["evicted_pages"] += len(evicted)
        return len(evicted)

    def are_ours(self, pages: SequenceOf[int], tags: SequenceOf[int]) -> list[bool]:
        """Which of these pages are held, by the allocation that had these tags."""
        ours = [now == tag for now, tag in zip(self._pool.known_tags(pages), tags, strict=True)]
        if self._pool.occupancy.draining:  # a page without a holder keeps its tag until it is free
            held = [self._pool.references(page) > 0 for page in pages]
            ours = [our and is_held for our, is_held in zip(ours, held, strict=True)]
        return ours

    def _prune(self, tokens: SequenceOf[int]) -> None:
        before = self._radix.stale_pages
        self._pool.free(self._radix.prune(tokens))
        if stale := self._radix.stale_pages - before:
            self._changes += 1
            log.error("engine.stale_prefix", extra={"pages": stale})

    def _prefill(self) -> Prefill | None:
        for sequence in self.running:
            if sequence.state is State.PREFILLING:
                first, end = sequence.next_chunk()
                return Prefill(sequence=sequence, first=first, end=end)
        return None

    def _decode(self) -> Decode | None:
        """All that decode and have a place for the KV of their last token."""
        for sequence in [one for one in self.running if one.state is State.DECODING]:
            if sequence.state is State.DECODING:  # may have been preempted for an older one
                self.busy_with = sequence
                self._grow(sequence)
        self.busy_with = None
        ready = [
            sequence
            for sequence in self.running
            if sequence.state is State.DECODING and self._has_room(sequence)
        ]
        return Decode(sequences=tuple(ready)) if ready else None

    def _has_room(self, sequence: Sequence) -> bool:
        return len(sequence.table) * self._page_tokens >= len(sequence.tokens)

    def _grow(self, sequence: Sequence) -> None:
        while not self._has_room(sequence):
            if self._make_room(1):
                (page,) = self._pool.allocate(1)
                self._clear(page)
                sequence.table.append([page])
                return
            able = [s for s in self.running if s.state in (State.PREFILLING, State.DECODING)]
            # With copies under way pages come back by themselves: nobody is sent away for those.
            others_wait = able[-1] is sequence and len(able) < len(self.running)
            if self._pool.occupancy.draining or others_wait:
                return
            self.preempt(able[-1])
            if able[-1] is sequence:
                return

    def _is_blocked(self, head: Sequence) -> bool:
        """Nothing has come back since it was not admitted: its prompt is not looked for again."""
        if self._blocked is None or not self.running:
            return False
        blocked, changes, free = self._blocked
        return blocked is head and changes == self._changes and self._pool.free_pages <= free

    def _admit(self, sequence: Sequence) -> bool:
        """Gives it the pages that its tokens need, shared ones first. False: not now."""
        if len(self.running) >= self._running_max:
            return False
        tokens, size = sequence.tokens, self._page_tokens
        pages = -(-len(tokens) // size)
        self._prune(tokens[: sequence.reusable_pages * size])
        found = len(self._radix.match(tokens[: sequence.reusable_pages * size]).pages)
        found -= found % sequence.chunk_pages
        match = self._radix.match(tokens[: found * size])
        sequence.lock = self._radix.lock(match)
        # Taken before room is made: a page in the middle of a node is not kept by the lock.
        self._pool.share(match.pages)
        sequence.table.append(match.pages)
        if not self._make_room(pages - found):
            sequence.drop_pages()
            return False
        sequence.table.append(self._pool.allocate(pages - found))
        self._clear(sequence.table.ids[-1])
        sequence.begin_prefill(found, pages)
        sequence.loading = self._start_load(sequence, found)
        sequence.fire(Event.ADMIT if sequence.loading is None else Event.AWAIT)
        return True

    def _start_load(self, sequence: Sequence, found: int) -> Loading | None:
        places = range(found, min(sequence.shareable_pages, sequence.reusable_pages))
        if self._tiers is None or not places:
            return None
        keys = sequence.keys(self._tiers.keys)
        ids = sequence.table.ids[places.start : places.stop]
        transfer = self._tiers.start_load(keys[places.start : places.stop], ids, sequence.request)
        return None if transfer is None else Loading(places, transfer)

    def _make_room(self, count: int) -> bool:
        """Whether `count` pages are free, after evicting what nobody uses."""
        while True:
            # Those that drain are free when a copy ends: nothing more has to go for them.
            occupancy = self._pool.occupancy
            missing = count - occupancy.free - occupancy.draining
            if missing > 0 and not self._can_evict(missing):
                return False
            if not self.evict(max(0, missing)):
                return occupancy.free >= count

    def _can_evict(self, count: int) -> bool:
        """Whether so many pages are the tree's alone, and not locked in it."""
        alone = (page for page in self._radix.unlocked() if self._pool.references(page) == 1)
        return sum(1 for _ in itertools.islice(alone, count)) == count

    def _clear(self, page: int) -> None:
        """What lies behind a sequence's last token is masked, which works for finite numbers alone,
        and a page may hold anything of its last owner, or of a load that failed.
        """
        self._pool.rows[page].zero_()
