"""Slots of the host tier that are granted ahead of time: their holder writes pages into them and
names these pages afterwards, with a seal.

A grant is a row in FILLING without a name. It ends when its holder seals it or gives it back; past
its deadline, or when the holder's connection is gone, the holder may still be writing: the slot is
quarantined, and free only when the holder returns it or its process is known to have ended. So a
slot is never reused while its writer may still write.

What a holder has of the tier is bounded, and so is what all of the tier lies in quarantine for
writers that did not stop. A part of the store, under the store's lock; every public method is safe
from any thread, but for `has` and `check`, whose caller holds the lock. Time is an argument
(monotonic seconds).
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.core.counters import Counters
from kvtier.core.ledger import LedgerError
from kvtier.core.lifecycle import State
from kvtier.core.page import KEY_BYTES, PageRef, PutCode, Tier
from kvtier.core.page_columns import PageColumns, once_each, rows_of
from kvtier.core.placement import Placement
from kvtier.core.residents import Residents
from kvtier.core.slabs import SLOT_UNIT, record_bytes_of
from kvtier.core.store_config import StoreConfig
from kvtier.core.table import NO_ROW

__all__ = ["Grants"]

_TIER = Tier.HOST
_STORED = PutCode.STORED
_FILLING = State.FILLING
#: All holders together have as much as so many may: more of them must not empty the tier.
_HOLDERS = 10


@dataclass(slots=True)
class _Held:
    """What one holder was granted and has not returned: FILLING, or QUARANTINED."""

    rows: dict[int, int] = field(default_factory=dict)  # generation -> row
    nbytes: int = 0


class Grants:
    def __init__(
        self,
        lock: threading.Lock,
        residents: Residents,
        *,
        placement: Placement,
        open_namespaces: Container[int],
        counters: Counters,
        config: StoreConfig,
    ) -> None:
        self._lock = lock
        self._residents = residents
        self._placement = placement
        self._open_namespaces = open_namespaces
        self._counters = counters
        self._boot_id = config.boot_id
        allocator = residents.allocators.get(_TIER)
        capacity_bytes = allocator.capacity_bytes if allocator is not None else 0
        self._holder_bytes_max = int(capacity_bytes * config.grants_share)
        self._all_bytes_max = _HOLDERS * self._holder_bytes_max
        self._orphaned_bytes_max = int(capacity_bytes * config.quarantine_share)
        self._held: dict[int, _Held] = {}
        #: (deadline, number of the take, holder, generations): those that have ended since, too.
        self._deadlines: list[tuple[float, int, int, list[int]]] = []
        self._takes = 0
        self._granted_pages = 0
        self._granted_bytes = 0
        self._quarantined_bytes = 0

    @property
    def granted_pages(self) -> int:
        """Grants that can be sealed."""
        return self._granted_pages

    @property
    def granted_bytes(self) -> int:
        """Bytes of the grants that can be sealed."""
        return self._granted_bytes

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of the grants that have expired, or whose holder is gone, and that may still be
        written."""
        return self._quarantined_bytes

    def take(self, holder: int, record_bytes: int, count: int, *, deadline: float) -> list[PageRef]:
        """Up to `count` slots for records of this size, for this holder until `deadline`. May
        evict.

        Fewer, or none: the holder has its share of the tier, or all together have theirs (it gets
        one record in any case, if it holds nothing), writers that did not stop keep their share of
        it, everything is in use, or the table is full. ValueError for a size that no slot has.
        """
        with self._lock:
            allocator = self._residents.allocators.get(_TIER)
            if allocator is None:
                return []
            if not 0 < record_bytes <= allocator.slab_bytes or record_bytes % SLOT_UNIT:
                raise ValueError(f"no slot has {record_bytes} bytes")
            wanted = min(count, self._allowed(holder, record_bytes))
            if wanted <= 0:
                return []
            rows = self._placement.begin_many(_TIER, record_bytes, wanted)
            if not rows:
                self._counters.busy += 1
                return []
            return self._grant(holder, rows, record_bytes, deadline)

    def refs(self, holder: int, generations: Sequence[int]) -> list[PageRef | None]:
        """The slot of each grant that this holder may still write to and seal; None: it is not its
        own, has expired, was taken away, or has ended."""
        with self._lock:
            rows = self._rows_of(holder)
            found = [rows.get(generation, NO_ROW) for generation in generations]
            are_live = self._are_live(found)
            refs = iter(
                self._refs([row for row, live in zip(found, are_live, strict=True) if live])
            )
            return [next(refs) if live else None for live in are_live]

    def seal_many(
        self,
        holder: int,
        namespace: int,
        shard: int,
        generations: Sequence[int],
        pages: PageColumns,
    ) -> npt.NDArray[np.uint8]:
        """PutCode for each page, one a grant, whose bytes are whole.

        EXISTS when a page as good is there or comes before it in this call, STALE_GENERATION when
        the namespace has ended, the slot was taken away or the grant has expired or is not this
        holder's, REFUSED when the page needs a slot of another size. All but STORED gives the slot
        back, an expired one too: who names a grant has stopped writing there. ValueError for
        numbers and names that the table cannot hold and for sequences of two lengths; nothing has
        changed.

        All pages of a call are sealed after the parents that were there before it were used.
        """
        if len(generations) != len(pages):
            raise ValueError(f"{len(generations)} grants for {len(pages)} pages")
        self._residents.check_name(namespace, shard)
        pages.check()
        with self._lock:
            # First: it is what can fail.
            heads = self._heads(namespace, shard, pages.keys)
            rows = self._let_go(holder, generations)
            if namespace in self._open_namespaces:
                codes = self._judge(rows, pages, heads)
                goes_in = [at for at, code in enumerate(codes) if code == _STORED]
                going = pages.take(goes_in)
                known = dict(zip(pages.keys, heads, strict=True))
                self._use_parents(namespace, shard, going.parents, known)
                self._residents.name_many([rows[at] for at in goes_in], namespace, shard, going)
                for turn, some in enumerate(once_each(goes_in, pages.keys)):
                    self._seal(some, rows, pages, heads, codes, is_again=turn > 0)
            else:
                codes = bytearray([PutCode.STALE_GENERATION]) * len(rows)
            named = zip(rows, codes, strict=True)
            self._free([row for row, code in named if code != _STORED and row != NO_ROW])
            self._count(codes)
        return np.frombuffer(codes, np.uint8)

    def give_back(self, holder: int, generations: Sequence[int]) -> int:
        """Frees grants of this holder, expired ones too; how many. It does not write there any
        more."""
        with self._lock:
            rows = [row for row in self._let_go(holder, generations) if row != NO_ROW]
            self._free(rows)
            return len(rows)

    def expire(self, now: float) -> int:
        """Quarantines the grants whose deadline has passed; how many. They stay their holders'."""
        with self._lock:
            count = 0
            while self._deadlines and self._deadlines[0][0] <= now:
                _, _, holder, generations = heapq.heappop(self._deadlines)
                rows = self._rows_of(holder)
                count += self._quarantine(rows[g] for g in generations if g in rows)
            return count

    def end(self, holder: int) -> int:
        """The holder's connection is gone, its process perhaps not: quarantines all its grants; how
        many it has in quarantine now."""
        with self._lock:
            rows = self._rows_of(holder)
            self._quarantine(rows.values())
            return len(rows)

    def settle(self, holder: int) -> int:
        """The holder's process has ended for sure: frees everything of it; how many slots."""
        with self._lock:
            rows = self._let_go(holder, list(self._rows_of(holder)))
            self._free(rows)
            return len(rows)

    # -- inside the lock ---------------------------------------------------------------------------

    def has(self, generation: int) -> bool:
        """That reservation is a grant which nobody has sealed or returned."""
        return any(generation in held.rows for held in self._held.values())

    def check(self) -> None:
        """Raises LedgerError unless this book agrees with the table."""
        table = self._residents.table
        record, filling = table.record, State.FILLING
        live: list[int] = []
        quarantined: list[int] = []
        for holder, held in self._held.items():
            for generation, row in held.rows.items():
                state = table.state[row]
                if table.generation[row] != generation:
                    raise LedgerError(f"grant {generation} of {holder} is another page's row")
                if state not in (filling, State.QUARANTINED):
                    raise LedgerError(f"grant {generation} of {holder} is {State(state).name}")
                (live if state == filling else quarantined).append(row)
            if held.nbytes != sum(record[row] for row in held.rows.values()) or not held.rows:
                raise LedgerError(f"holder {holder} has not {held.nbytes} bytes")
        found = len(live), sum(record[r] for r in live), sum(record[r] for r in quarantined)
        booked = self._granted_pages, self._granted_bytes, self._quarantined_bytes
        if found != booked:
            raise LedgerError(f"grants: pages and bytes found {found}, booked {booked}")

    def _allowed(self, holder: int, record_bytes: int) -> int:
        """Records of this size that the holder may be granted."""
        residents = self._residents
        orphaned = residents.ledger.bytes_in(_TIER, State.QUARANTINED)
        orphaned -= residents.quarantine.kept_bytes(_TIER)
        if orphaned >= self._orphaned_bytes_max:
            return 0
        held = self._held.get(holder)
        left = min(
            self._holder_bytes_max - (held.nbytes if held is not None else 0),
            self._all_bytes_max - self._granted_bytes,
        )
        return max(0 if held is not None else 1, left // record_bytes)

    def _grant(
        self, holder: int, rows: Sequence[int], record_bytes: int, deadline: float
    ) -> list[PageRef]:
        refs = self._refs(rows)
        generations = [ref.generation for ref in refs]
        nbytes = record_bytes * len(rows)
        held = self._held.setdefault(holder, _Held())
        held.rows.update(zip(generations, rows, strict=True))
        held.nbytes += nbytes
        self._granted_pages += len(rows)
        self._granted_bytes += nbytes
        self._takes += 1
        heapq.heappush(self._deadlines, (deadline, self._takes, holder, generations))
        return refs

    def _rows_of(self, holder: int) -> Mapping[int, int]:
        held = self._held.get(holder)
        return held.rows if held is not None else {}

    def _let_go(self, holder: int, generations: Iterable[int]) -> list[int]:
        """Takes grants of the holder out of the book, once each; their rows, NO_ROW for what is
        not its own. The caller seals or frees every one of them."""
        held = self._held.get(holder, _Held())
        record, state = self._residents.table.record, self._residents.table.state
        rows = []
        for generation in generations:
            row = held.rows.pop(generation, NO_ROW)
            rows.append(row)
            if row == NO_ROW:
                continue
            held.nbytes -= record[row]
            if state[row] == _FILLING:
                self._granted_pages -= 1
                self._granted_bytes -= record[row]
            else:
                self._quarantined_bytes -= record[row]
        if not held.rows:
            self._held.pop(holder, None)
        return rows

    def _quarantine(self, rows: Iterable[int]) -> int:
        """The writers of these grants may still write, and nobody waits for them; how many were
        FILLING."""
        table, count = self._residents.table, 0
        for row in rows:
            if table.state[row] == State.FILLING:
                self._residents.orphan(row)
                self._granted_pages -= 1
                self._granted_bytes -= table.record[row]
                self._quarantined_bytes += table.record[row]
                count += 1
        return count

    def _free(self, rows: Sequence[int]) -> None:
        """Nobody writes there any more."""
        state = self._residents.table.state
        self._residents.abandon_many([row for row in rows if state[row] == _FILLING])
        self._residents.drain_many([row for row in rows if state[row] == State.QUARANTINED])

    def _are_live(self, rows: Sequence[int]) -> list[bool]:
        """Which of these rows of grants, or NO_ROW, can be sealed."""
        residents, state = self._residents, self._residents.table.state
        live = [row != NO_ROW and state[row] == _FILLING for row in rows]
        allocator = residents.allocators.get(_TIER)
        if allocator is not None and allocator.closed:
            named = zip(rows, live, strict=True)
            live = [is_live and residents.is_lasting(row) for row, is_live in named]
        return live

    def _judge(self, rows: Sequence[int], pages: PageColumns, heads: Sequence[int]) -> bytearray:
        """What becomes of pages by what there was before this call; STORED: it can be sealed."""
        residents, record = self._residents, self._residents.table.record
        codes = bytearray([_STORED]) * len(rows)
        live = self._are_live(rows)
        named = zip(rows, live, pages.lengths, pages.lossy, heads, strict=True)
        for at, (row, is_live, length, lossy, head) in enumerate(named):
            if not is_live:
                codes[at] = PutCode.STALE_GENERATION
            elif record[row] != record_bytes_of(length):
                codes[at] = PutCode.REFUSED
            elif head != NO_ROW and residents.is_there(head, lossy=lossy):
                codes[at] = PutCode.EXISTS
        return codes

    def _seal(
        self,
        some: list[int],
        rows: Sequence[int],
        pages: PageColumns,
        heads: list[int],
        codes: bytearray,
        *,
        is_again: bool,
    ) -> None:
        """Seals these pages, each once; `is_again`: those that this call has sealed already are
        there now."""
        residents, table = self._residents, self._residents.table
        if is_again:
            for at in some:
                row = rows[at]
                heads[at] = residents.index.find(
                    table.namespace[row], table.shard[row], pages.keys[at]
                )
                if residents.is_there(heads[at], lossy=pages.lossy[at]):
                    codes[at] = PutCode.EXISTS
            some = [at for at in some if codes[at] == _STORED]
        going = [rows[at] for at in some]
        residents.seal_many(going, pages.take(some), [heads[at] for at in some])

    def _heads(self, namespace: int, shard: int, keys: Sequence[bytes]) -> list[int]:
        """The best copy of each page, or NO_ROW."""
        rows = self._residents.index.find_many(namespace, shard, rows_of(keys, KEY_BYTES))
        found: list[int] = rows.tolist()
        return found

    def _use_parents(
        self, namespace: int, shard: int, parents: Sequence[bytes], known: Mapping[bytes, int]
    ) -> None:
        """A page that goes on is in use, as in `Store.reserve`. Most pages of a call come after
        another one of it."""
        find = self._residents.index.find
        rows = []
        for parent in dict.fromkeys(parents):
            row = known.get(parent)
            if row is None:
                row = find(namespace, shard, parent) if parent else NO_ROW
            if row != NO_ROW:
                rows.append(row)
        for row in reversed(rows):
            self._residents.lead(row)

    def _count(self, codes: bytearray) -> None:
        self._counters.stored += codes.count(PutCode.STORED)
        self._counters.exists += codes.count(PutCode.EXISTS)
        self._counters.stale_commits += codes.count(PutCode.STALE_GENERATION)

    def _refs(self, rows: Sequence[int]) -> list[PageRef]:
        slot, generation = self._residents.table.slot, self._residents.table.generation
        boot_id, tier = self._boot_id, _TIER
        return [PageRef(boot_id, tier, slot[row], generation[row]) for row in rows]
