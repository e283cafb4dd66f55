"""The Policy of a tier that evicts the page with the lowest learned index.

It goes by requests. Whoever replays a trace names each before its pages are touched and admitted
(`request`): when it came, the words of its whole path, how many tokens it is to bring forth. In a
daemon nobody knows a request as a whole, so it is put together from what happens: pages that are
used from the head of their chain are a request; pages that come after the last page of a recent one
make it longer (a get that goes on, the put of what was not there); what was used a moment ago is
used by the same request (another rank of its engine). Its time is `Clock.seconds`. Words of a page
are `words_of` its row, and of a key the same from its bytes: shards of one page have the same.

The estimator needs no page: it goes on with what it knows when pages are evicted. `learned` and
`learn_from` carry what it has learned from one process to the next. Work of a call: a few steps for
each page that it names; for a request that was not heard of, one for each page of its path; for an
eviction a sample of SAMPLES requests for each run of pages that goes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.policy.gittins import layout, pages, serve
from kvtier.core.policy.gittins.forecast import Forecast
from kvtier.core.policy.gittins.known import depths, find, path_to
from kvtier.core.policy.gittins.layout import BINS, COARSE, MODEL_ROWS, NONE, ORPHANS
from kvtier.core.policy.gittins.sampled import TIER, leave_list
from kvtier.core.policy.lru import NEVER, Clock
from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["LEARNED_BYTES", "Gittins"]

Words = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

_TICK: Final = 1e-3  # seconds
#: What was used so long ago is used by the same request: by another rank, or by the put of what a
#: get did not find. A conversation that comes back earlier is taken for one request.
_SAME_S: Final = 1.0
#: As long as pages that come after the last one of a request may be its own: a prefill takes time.
_GOES_ON_S: Final = 60.0
#: Of `Gittins.learned`.
LEARNED_BYTES: Final = 2 * MODEL_ROWS * (BINS + COARSE) * 4 + 3 * 8 + 8
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
        self._parent: npt.NDArray[np.int32] = table.column("parent")
        self._pages = pages.Pages(link, *columns)
        self._link = link.reshape(-1).data
        self.forecast = _Forecast(self._pages, seed, has_bypass=has_bypass)
        self._path: Words = np.empty(0, np.uint64)
        self._path_slot = NONE
        self._members = 0
        self._room = 0  # pages that there is room for, once one was to be evicted; 0: not yet
        self._is_full = False  # no page was admitted since one was to be evicted
        self._victim, self._floor = NONE, 0
        self._led = NONE  # slot of the request that a page is about to come to

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
        if self._is_of_path(rows):
            return
        begins = np.empty(len(rows), np.int64)
        ordered = np.empty(len(rows), np.int64)
        pieces = pages.chains(self._pages.link, self._parent, rows, ordered, begins)
        for begin, end in pairwise([*begins[:pieces].tolist(), len(rows)]):
            self._use(ordered[begin:end])

    def touch(self, rows: Rows) -> None:
        """See Policy."""
        n = len(rows)
        first = self._clock.ticks(n)
        self._table.column("stamp")[rows] = np.arange(first + n - 1, first - 1, -1)
        self._victim = NONE
        rows = rows[self._pages.link[rows, pages.SLOT] != 0]
        if self._is_of_path(rows):
            return
        # Pieces of chains, each from its head to its tail.
        cuts = np.flatnonzero(self._parent[rows[1:]] != rows[:-1] + 1) + 1
        for begin, end in pairwise([0, *cuts.tolist(), len(rows)]):
            self._use(rows[begin:end])

    def lead(self, row: int) -> None:
        """See Policy."""
        slot = self._link[row * pages.LINKS + pages.SLOT]
        if slot <= 0:
            return
        if self._now() - float(self.forecast.arrays.time[slot]) > _GOES_ON_S:
            self.touch(np.array([row], np.int64))
            slot = self._link[row * pages.LINKS + pages.SLOT]
        self._led = slot

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
                slot = self._victim = pages.pick(self.forecast.arrays, self._pages, self._led)
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
                leave_list(self.forecast.arrays, TIER, slot)

    def coldest(self) -> int:
        """See Policy."""
        row = pages.oldest_row(self.forecast.arrays, self._pages)
        return NEVER if row == NONE else self._table.stamp[row]

    # -- what is known -------------------------------------------------------------------------

    def hint(self, namespace: int, key: bytes, returns_after_s: float) -> bool:
        """See Forecasting."""
        (word,) = np.frombuffer(key[:8], np.uint64) ^ (np.array([namespace], np.uint64) * _MIX)
        return self.hint_word(word, returns_after_s)

    def hint_word(self, word: np.uint64, returns_after_s: float) -> bool:
        """As `hint`, of the page that is known by this word."""
        state = self.forecast.arrays
        block = find(state.table, state.word, word)
        if block == NONE:
            return False
        self._victim = NONE
        state.level[layout.NOW] = max(state.level[layout.NOW], self._now())
        self.forecast.heed(int(state.block[block, layout.OWNER]), returns_after_s)
        return True

    def learned(self) -> bytes:
        """What was learned of this tier's requests, LEARNED_BYTES long: the weights of the model
        (float32), the mean path and the guard's two sums (float64), and who is in charge (int64),
        little-endian. Requests and pages are not in it."""
        state = self.forecast.arrays
        level = state.level[[layout.PATH_MEAN, layout.LEAD, layout.WEIGHT]]
        parts = (
            state.fine.astype("<f4"),
            state.coarse.astype("<f4"),
            level.astype("<f8"),
            state.counts[[layout.IS_LRU]].astype("<i8"),
        )
        return b"".join(part.tobytes() for part in parts)

    def learn_from(self, learned: bytes) -> None:
        """Takes up what `learned` gave. Raises ValueError for what it cannot have given."""
        state = self.forecast.arrays
        fine_end = state.fine.nbytes
        coarse_end = fine_end + state.coarse.nbytes
        if len(learned) != LEARNED_BYTES:
            raise ValueError(f"{len(learned)} bytes where {LEARNED_BYTES} belong")
        fine = np.frombuffer(learned[:fine_end], "<f4").reshape(state.fine.shape)
        coarse = np.frombuffer(learned[fine_end:coarse_end], "<f4").reshape(state.coarse.shape)
        level = np.frombuffer(learned[coarse_end:-8], "<f8")
        (is_lru,) = np.frombuffer(learned[-8:], "<i8").tolist()
        numbers = (fine, coarse, level)
        if not all(bool(np.isfinite(part).all()) for part in numbers) or is_lru not in (0, 1):
            raise ValueError("numbers that nothing can be learned to")
        if (fine[1] < 0).any() or (coarse[1] < 0).any() or level[0] < 0 or level[2] < 0:
            raise ValueError("squares that are negative")
        state.fine[:], state.coarse[:] = fine, coarse
        state.level[[layout.PATH_MEAN, layout.LEAD, layout.WEIGHT]] = level
        state.counts[layout.IS_LRU] = is_lru

    # -- inner ---------------------------------------------------------------------------------

    def _join(self, rows: Rows, places: npt.NDArray[np.int32], slot: int) -> None:
        pages.join(self.forecast.arrays, self._pages, rows, places, slot)
        counts = self.forecast.arrays.counts
        if slot != self._path_slot:
            counts[layout.ROW_OLDEST] = counts[layout.OLDEST]

    def _is_of_path(self, rows: Rows) -> bool:
        """Pages of the request that was named last, which takes them."""
        if self._path_slot == NONE:
            return False
        places = np.empty(len(rows), np.int32)
        if pages.locate(self._path, self.words_of(rows), places) < len(rows):
            return False
        self._join(rows, places, self._path_slot)
        return True

    def _now(self) -> float:
        """By the store's clock; without one each request is a moment after the last."""
        latest = float(self.forecast.arrays.level[layout.NOW])
        return max(self._clock.seconds, latest) if self._clock.seconds else latest + _TICK

    def _use(self, rows: Rows) -> None:
        """Pages from the head of a piece of a chain to its tail, which no request has named."""
        while len(rows):
            words = self.words_of(rows)
            slot, count = self._tell(words, int(self._parent[rows[0]]) - 1)
            self._join(rows[:count], depths(self.forecast.arrays, words[:count]), slot)
            rows = rows[count:]

    def _tell(self, words: Words, row_before: int) -> tuple[int, int]:
        """(slot of the request that uses these, how many of them it has: at least one)."""
        state, now = self.forecast.arrays, self._now()
        first = find(state.table, state.word, words[0])
        if first != NONE:
            before = int(state.block[first, layout.PARENT])
            slot, count = self._same_request(words, now)
            if count:
                return slot, count
        else:
            before = NONE
            if row_before != NO_ROW:
                (word,) = self.words_of(np.array([row_before]))
                before = find(state.table, state.word, word)
        room = max(1, self._room or self._members + len(words))
        if before != NONE:
            slot = int(state.block[before, layout.OWNER])
            is_last = state.slot[slot, layout.LEAF] == before
            if is_last and now - state.time[slot] <= _GOES_ON_S:
                count = self.forecast.grow(slot, words, pages=room)
                if count:
                    return slot, count
        path = np.concatenate([path_to(state, before), words])
        slot = self.forecast.serve(now, path, pages=room)
        # All but what is known to come after another page; the first one is not.
        count = int(self.forecast.arrays.slot[slot, layout.LENGTH]) - (len(path) - len(words))
        return slot, max(1, count)

    def _same_request(self, words: Words, now: float) -> tuple[int, int]:
        """(slot, how many of the words a request of a moment ago has used, if not others)."""
        state = self.forecast.arrays
        last = find(state.table, state.word, words[-1])
        if last == NONE:
            return NONE, 0
        slot = int(state.block[last, layout.OWNER])
        begin = int(state.block[last, layout.DEPTH]) - len(words) + 1
        is_same = now - state.time[slot] <= _SAME_S and begin >= state.slot[slot, layout.START]
        return (slot, len(words)) if is_same else (NONE, 0)

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
