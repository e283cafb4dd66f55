"""The Policy of a tier that evicts the page with the lowest learned index.

Beside the calls of Policy it hears of requests (`request`): when each came, the words of its whole
path, and how many tokens it is to bring forth. In a simulation whoever replays the trace says so
before it touches and admits the request's pages. In a daemon it is whoever answers a lookup or a
get: there the keys of the whole path are at hand, the first call of a request comes before its
pages are touched or put, and the time is the daemon's monotonic clock, read at its border and
handed down; the output length is a hint of the put, and unknown otherwise. Words of a page are
`words_of` its row, and of a key the same from its bytes: shards of one page have the same.

Pages that are used or admitted without a request that names them are a request of their own, a
millisecond after the last one; an admitted page that is known is put where it was known.

The estimator needs no page: it goes on with what it knows when pages are evicted, and `export` and
`restore` carry it from one process to the next. Work of a call: a few steps for each page that it
names, and for an eviction a sample of SAMPLES requests for each run of pages that goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtier.core.policy.gittins import layout, pages, segments, serve
from kvtier.core.policy.gittins.forecast import Forecast
from kvtier.core.policy.gittins.known import find
from kvtier.core.policy.gittins.layout import NONE, ORPHANS, SLOT_COLUMNS
from kvtier.core.policy.lru import NEVER, Clock
from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["Gittins"]

Words = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

_TICK: Final = 1e-3  # seconds
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


class Gittins:
    def __init__(
        self, table: CopyTable, clock: Clock, *, seed: int = 1, has_bypass: bool = False
    ) -> None:
        """`has_bypass`: `takes` may refuse pages that are worth less than what is here."""
        self._table, self._clock = table, clock
        # Zeros, which cost no memory until a row of this tier is used.
        link = np.zeros((table.rows_max, pages.LINKS), np.int32)
        columns = [table.column(name) for name in ("children", "leases", "queued")]
        self._pages = pages.Pages(link, *columns)
        self._link = link.reshape(-1).data
        self.forecast = _Forecast(self._pages, seed, has_bypass=has_bypass)
        self._path: Words = np.empty(0, np.uint64)
        self._path_slot = NONE
        self._members = 0
        self._room = 0  # pages that there is room for, once one was to be evicted; 0: not yet
        self._is_full = False  # no page was admitted since one was to be evicted
        self._victim, self._floor = NONE, 0

    def __len__(self) -> int:
        return self._members

    def request(
        self, now: float, words: Words, *, whole: int | None = None, output: int | None = None
    ) -> None:
        """A request whose blocks, from the first, are known by `words` comes `now` (seconds).

        `whole`: how many of them are whole pages. `output`: tokens that it is to bring forth.
        """
        self._victim = NONE
        self._path = words
        room = self._room or self._members + len(words)
        self._path_slot = self.forecast.serve(
            now, words, pages=max(1, room), whole=whole, output=output
        )

    def takes(self, words: Words) -> int:
        """How many of these pages, which are to be admitted, are worth it: leading ones."""
        state = self.forecast.arrays
        if not self.forecast.has_bypass or state.counts[layout.IS_LRU] or not len(words):
            return len(words)
        places = np.empty(len(words), np.int32)
        if pages.locate(self._path, words, places) < len(words):
            return len(words)
        end = state.slot[self._path_slot, layout.SHADOW_END]
        return int(np.count_nonzero(places < end))

    def words_of(self, rows: Rows) -> Words:
        """What the pages of these rows are known by."""
        namespaces = self._table.column("namespace")[rows].astype(np.uint64)
        words: Words = self._table.key_words_np[rows, 0] ^ (namespaces * _MIX)
        return words

    # -- Policy --------------------------------------------------------------------------------

    def admit(self, row: int) -> None:
        """See Policy."""
        self.admit_many(np.array([row], np.int64))

    def admit_many(self, rows: Rows) -> None:
        """See Policy."""
        first = self._clock.ticks(len(rows))
        self._table.column("stamp")[rows] = np.arange(first, first + len(rows))
        self._members += len(rows)
        if self._room:
            self._room = max(self._room, self._members)
        self._is_full = False
        self._victim = NONE
        places = np.empty(len(rows), np.int32)
        words = self.words_of(rows)
        if self._path_slot != NONE and pages.locate(self._path, words, places) == len(rows):
            self._join(rows, places)
            return
        for row, word in zip(rows.tolist(), words.tolist(), strict=True):
            self._admit_known(row, word)

    def touch(self, rows: Rows) -> None:
        """See Policy."""
        n = len(rows)
        first = self._clock.ticks(n)
        self._table.column("stamp")[rows] = np.arange(first + n - 1, first - 1, -1)
        self._victim = NONE
        rows = rows[self._pages.link[rows, pages.SLOT] != 0]
        places = np.empty(len(rows), np.int32)
        words = self.words_of(rows)
        if self._path_slot == NONE or pages.locate(self._path, words, places) < len(rows):
            rows = np.array(list(dict.fromkeys(rows.tolist())), np.int64)
            words = self.words_of(rows)
            self._request_unnamed(words)
            places = np.arange(len(rows), dtype=np.int32)
        self._join(rows, places)

    def keep(self, row: int) -> None:
        """See Policy."""
        return  # it is taken off the list when it is met

    def ready(self, row: int) -> None:
        """See Policy."""
        if self._link[row * pages.LINKS + pages.SLOT]:
            pages.relist(self.forecast.arrays, self._pages, row)

    def forget(self, row: int) -> None:
        """See Policy."""
        if self._link[row * pages.LINKS + pages.SLOT]:
            self._victim = NONE
            self._leave(row)

    def evict(self, evictable: Callable[[int], bool]) -> int:
        """See Policy."""
        children, leases, link = self._table.children, self._table.leases, self._link
        if not self._is_full:  # the first of several
            self._is_full, self._room = True, self._members
        while True:
            slot = self._victim
            if slot == NONE:
                slot = self._victim = pages.pick(self.forecast.arrays, self._pages)
                if slot == NONE:
                    return NO_ROW
                self._floor = self._run_begin(slot)
            row = int(self.forecast.arrays.slot[slot, layout.ROW_TAIL])
            at = row * pages.LINKS
            if row == NONE or link[at + pages.PLACE] < self._floor or children[row] or leases[row]:
                self._victim = NONE
            elif evictable(row):
                self._leave(row)
                return row
            else:
                self._victim = NONE
                self._table.queued[row] = 0
                pages.leave_list(self.forecast.arrays, slot)

    def coldest(self) -> int:
        """See Policy."""
        row = pages.oldest_row(self.forecast.arrays, self._pages)
        return NEVER if row == NONE else self._table.stamp[row]

    # -- state ---------------------------------------------------------------------------------

    def export(self) -> dict[str, npt.NDArray[Any]]:
        """Everything that it has learned, as arrays by name; pages are not in it."""
        found = {name: array.copy() for name, array in self.forecast.arrays._asdict().items()}
        slot = found["slot"]
        slot[:, [layout.ROW_TAIL, layout.ROW_AT]] = NONE
        slot[:, layout.ROW_COUNT] = 0
        found["counts"][[layout.ROW_LIVE, layout.ROW_OLDEST]] = 0
        found["pool"][1] = NONE
        return found

    def restore(self, saved: Mapping[str, npt.NDArray[Any]]) -> None:
        """Takes up what `export` gave, before any page is admitted. Raises ValueError for arrays
        that are not of this version's shape."""
        made = layout.State(**{name: saved[name].copy() for name in layout.State._fields})
        expected = self.forecast.arrays
        for name in layout.State._fields:
            array: npt.NDArray[Any] = getattr(made, name)
            own: npt.NDArray[Any] = getattr(expected, name)
            if array.dtype != own.dtype or array.shape[1:] != own.shape[1:]:
                raise ValueError(f"{name} has another shape in this version")
        if made.slot.shape[1] != SLOT_COLUMNS or self._members:
            raise ValueError("a state is taken up by a policy without pages")
        self.forecast.arrays = made

    # -- inner ---------------------------------------------------------------------------------

    def _join(self, rows: Rows, places: npt.NDArray[np.int32]) -> None:
        pages.join(self.forecast.arrays, self._pages, rows, places, self._path_slot)

    def _request_unnamed(self, words: Words) -> None:
        self.request(float(self.forecast.arrays.level[layout.NOW]) + _TICK, words)

    def _admit_known(self, row: int, word: int) -> None:
        """A page that no request has named."""
        state = self.forecast.arrays
        rows = np.array([row], np.int64)
        block = find(state.table, state.word, np.uint64(word))
        if block == NONE:
            self._request_unnamed(np.array([word], np.uint64))
            self._join(rows, np.zeros(1, np.int32))
            return
        slot = int(state.block[block, layout.OWNER])
        place = np.array([pages.position_of(state, block)], np.int32)
        segments.price(state, slot)
        pages.join(state, self._pages, rows, place, slot)
        state.counts[layout.ROW_OLDEST] = state.counts[layout.OLDEST]

    def _leave(self, row: int) -> None:
        pages.unlink(self.forecast.arrays, self._pages, row)
        self._table.queued[row] = 0
        self._members -= 1

    def _run_begin(self, slot: int) -> int:
        """Where the run of the tail of this request begins: the pages from there on are worth the
        same."""
        state = self.forecast.arrays
        if slot == ORPHANS or state.counts[layout.IS_LRU]:
            return -(1 << 31)
        row = state.slot[slot]
        place = self._link[int(row[layout.ROW_TAIL]) * pages.LINKS + pages.PLACE]
        begin = 0
        for run in range(int(row[layout.RUNS])):
            end = int(row[layout.RUN_END + run])
            if end > place:
                break
            begin = end
        return begin


class _Forecast(Forecast):
    """Whose oldest requests may have pages in the tier."""

    def __init__(self, tier: pages.Pages, seed: int, *, has_bypass: bool) -> None:
        super().__init__(seed, has_bypass=has_bypass)
        self._tier = tier
        self.owners = tier.link[:, pages.SLOT]

    def _forget_oldest(self) -> None:
        pages.orphan(self.arrays, self._tier)
        serve.forget_oldest(self.arrays)
