"""What is known of the reuse of pages, as an object over the arrays and kernels of this package.

It hears of requests and nothing else: when each came, the words that its blocks are known by from
the first to the last, how many tokens it is to bring forth. Time is an argument.

Bounded: at most `KNOWN_PER_PAGE` blocks for each page that the tier has room for are remembered,
and at most as many requests as it has pages (or REQUESTS_MIN); the oldest are forgotten. The same
requests and seed give the same decisions on every machine with the same floating point.

One user; the caller holds the store's lock.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.policy.gittins import known, layout, segments, serve
from kvtier.core.policy.gittins.layout import NONE, make_state, more_blocks, more_curves, more_slots

__all__ = ["KNOWN_PER_PAGE", "REQUESTS_MIN", "Forecast"]

KNOWN_PER_PAGE: Final = 16
REQUESTS_MIN: Final = 4096
_BLOCKS_MIN: Final = 1024


class Forecast:
    def __init__(self, seed: int = 1, *, has_bypass: bool = False) -> None:
        """`has_bypass`: the request just served may be what gives way."""
        self.arrays = make_state(seed)
        self.has_bypass = has_bypass
        #: Of the pages of the tier: slot of the request that used each last, 0 or less for none.
        self.owners: npt.NDArray[np.int32] = np.empty(0, np.int32)

    def serve(
        self,
        now: float,
        words: npt.NDArray[np.uint64],
        *,
        pages: int,
        whole: int | None = None,
        output: int | None = None,
    ) -> int:
        """A request; the slot that it has got. `pages`: that the tier has room for."""
        self._make_slot(pages)
        self._make_room(len(words))
        slot = serve.serve(
            self.arrays,
            now,
            words,
            len(words) if whole is None else whole,
            NONE if output is None else output,
            pages,
            self.has_bypass,
        )
        self._forget(pages)
        return slot

    def grow(self, slot: int, words: npt.NDArray[np.uint64], *, pages: int) -> int:
        """The path of a remembered request goes on; how many of the words it has then."""
        # Nothing is forgotten here, which could be this very request.
        self._make_room(len(words))
        grown: int = serve.grow(self.arrays, slot, words, pages, self.has_bypass)
        return grown

    def heed(self, slot: int, returns_after_s: float) -> None:
        """What was said of the return of a request's conversation; negative: it has ended."""
        self._make_room(0)
        segments.heed(self.arrays, slot, returns_after_s)

    def _forget(self, pages: int) -> None:
        count = self.arrays.counts
        known_max = max(_BLOCKS_MIN, KNOWN_PER_PAGE * pages)
        while count[layout.KNOWN] > known_max and count[layout.OLDEST] < count[layout.NEXT] - 1:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        serve.forget_oldest(self.arrays)

    def _make_slot(self, pages: int) -> None:
        count, slots = self.arrays.counts, len(self.arrays.time) - 1
        if count[layout.NEXT] - count[layout.OLDEST] >= slots:
            if slots < max(REQUESTS_MIN, pages):
                self.arrays = more_slots(self.arrays, self.owners)
            else:
                self._forget_oldest()

    def _make_room(self, blocks: int) -> None:
        """Of blocks and curves."""
        state = self.arrays
        count = state.counts
        while count[layout.KNOWN] + blocks > len(state.word):
            state = more_blocks(state)
            known.rehash(state)
        if count[layout.CURVES_USED] + 2 * layout.RUNS_MAX > len(state.curve):
            segments.sweep_curves(state)
            if count[layout.CURVES_USED] > len(state.curve) // 2:
                state = more_curves(state)
        self.arrays = state
