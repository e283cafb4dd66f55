"""One request inside the engine: its tokens, its pages, and how far it is.

Only the engine's thread touches it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch

from kvtier import GetCode
from kvtier.client.device import DevicePool, LayeredLoad, LoadResult, PageTable
from kvtier_engine.cache.radix import Lock
from kvtier_engine.errors import EngineInconsistent
from kvtier_engine.sampling import Chooser
from kvtier_engine.schedule.output import Output
from kvtier_engine.schedule.request import CachedTokens, Request
from kvtier_engine.schedule.states import Event, State, after

__all__ = ["Loading", "Sequence"]


class Loading:
    """A load from kvtier under way: `places[i]` is the page of the prompt that key i is of."""

    __slots__ = ("places", "transfer")

    def __init__(self, places: SequenceOf[int], transfer: LayeredLoad) -> None:
        self.places = places
        self.transfer = transfer


class Sequence:
    """`tokens` are prompt and answer; the last one is not in the KV yet while it decodes.

    `ready[i]` says that page i of what is to be prefilled holds its KV. `prefill_tokens` is how
    many tokens that is: the prompt, and after a preemption the answer so far with it. `found`
    counts pages of the first prefill that were not computed, by tier.
    """

    def __init__(
        self,
        number: int,
        request: Request,
        output: Output,
        pool: DevicePool,
        *,
        chunk_pages: int = 1,
    ) -> None:
        self.number = number
        self.request = request
        self.output = output
        self.chooser = Chooser(request.sampling)
        self.state = State.WAITING
        self.tokens: list[int] = list(request.prompt)
        self.table = PageTable(pool)
        self.ready: list[bool] = []
        self.computed: set[int] = set()
        #: Least and greatest number of each page that was computed, where the pages lie.
        self.extremes: list[torch.Tensor] = []
        self.prefill_tokens = 0
        self.lock: Lock | None = None
        self.loading: Loading | None = None
        #: The load whose layers may still be on their way into this request's pages.
        self.arriving: LayeredLoad | None = None
        self.found: Counter[str] = Counter()
        self.preemptions = 0
        self._keys: SequenceOf[bytes] | None = None
        self._page_tokens = pool.form.page_tokens
        self.chunk_pages = chunk_pages

    def fire(self, event: Event) -> None:
        """Raises EngineInconsistent for an event that cannot be there, and changes nothing."""
        self.state = after(self.state, event)

    def keys(self, of_tokens: Callable[[SequenceOf[int]], SequenceOf[bytes]]) -> SequenceOf[bytes]:
        """One key for each full page of the prompt, hashed once."""
        if self._keys is None:
            self._keys = of_tokens(self.request.prompt)
        return self._keys

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def shareable_pages(self) -> int:
        """Pages of the prompt whose KV is that of whole prefill passes."""
        return self._whole_chunks(self.prompt_tokens)

    @property
    def reusable_pages(self) -> int:
        """Pages that may come from a cache. The last token is always computed: without its logits
        there is no next one.
        """
        return self._whole_chunks(len(self.tokens) - 1)

    @property
    def cached(self) -> CachedTokens:
        size = self._page_tokens
        return CachedTokens(**{tier: pages * size for tier, pages in self.found.items()})

    def begin_prefill(self, found: int, pages: int) -> None:
        """Everything there is, is to be prefilled: `pages` pages, of which the first `found` are
        ready.
        """
        self.prefill_tokens = len(self.tokens)
        self.ready = [place < found for place in range(pages)]
        self.computed = set()
        self.extremes = []
        self.arriving = None
        if not self.preemptions:
            self.found["device"] += found

    def take_loaded(self, result: LoadResult) -> None:
        """Marks what a load brings. A chunk of which a page is missing is computed whole."""
        loading, self.loading = self.loading, None
        if loading is None:
            raise EngineInconsistent("a load that nobody began", remedy="report this: a defect")
        self.arriving = loading.transfer
        reasons = result.reasons
        for at in range(0, len(reasons), self.chunk_pages):
            part = slice(at, at + self.chunk_pages)
            if all(reason is GetCode.HIT for reason in reasons[part]):
                for place, tier in zip(loading.places[part], result.tiers[part], strict=True):
                    self.ready[place] = True
                    if tier is not None and not self.preemptions:
                        self.found[tier.name.lower()] += 1
        self.fire(Event.LOADED)

    def next_chunk(self) -> tuple[int, int]:
        """(first, end) pages of the next pass."""
        first = self.ready.index(False)
        return first, min(first + self.chunk_pages, len(self.ready))

    def take_computed(self, first: int, end: int) -> bool:
        """Pages `first` .. `end` - 1 hold their KV now. True when none is missing any more."""
        for place in range(first, end):
            self.ready[place] = True
            self.computed.add(place)
        return all(self.ready)

    def _whole_chunks(self, tokens: int) -> int:
        pages = tokens // self._page_tokens
        return pages - pages % self.chunk_pages

    def drop_pages(self) -> tuple[int, ...]:
        """Gives back pages and lock; pages that are another's by now are left, and returned."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None
        self.ready = []
        self.arriving = None
        return self.table.release()
