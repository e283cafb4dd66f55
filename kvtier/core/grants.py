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
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.core.counters import Counters
from kvtier.core.ledger import LedgerError
from kvtier.core.lifecycle import State
from kvtier.core.page import KEY_BYTES, PageMeta, PageRef, PutCode, Tier
from kvtier.core.placement import Placement
from kvtier.core.residents import Residents
from kvtier.core.slabs import SLOT_UNIT, record_bytes_of
from kvtier.core.table import NO_ROW

if TYPE_CHECKING:
    from kvtier.core.store import StoreConfig

__all__ = ["Grants"]

_TIER = Tier.HOST
_STORED = PutCode.STORED
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
            refs: list[PageRef] = []
            wanted = min(count, self._allowed(holder, record_bytes))
            try:
                while len(refs) < wanted:
                    row = self._placement.begin(_TIER, record_bytes)
                    if row == NO_ROW:
                        break
                    refs.append(self._grant(holder, row, record_bytes))
            finally:  # the journal of generations can fail: what was granted by then ends, too
                self._end_at(deadline, holder, refs)
            if wanted > 0 and not refs:
                self._counters.busy += 1
            return refs

    def refs(self, holder: int, generations: Sequence[int]) -> list[PageRef | None]:
        """The slot of each grant that this holder may still write to and seal; None: it is not its
        own, has expired, was taken away, or has ended."""
        with self._lock:
            rows = self._rows_of(holder)
            found = (rows.get(generation, NO_ROW) for generation in generations)
            return [self._ref(row) if self._is_live(row) else None for row in found]

    def seal_many(
        self,
        holder: int,
        namespace: int,
        shard: int,
        generations: Sequence[int],
        metas: Sequence[PageMeta],
    ) -> npt.NDArray[np.uint8]:
        """PutCode for each page, one a grant, whose bytes are whole.

        EXISTS when a page as good is there or comes before it in this call, STALE_GENERATION when
        the namespace has ended, the slot was taken away or the grant has expired or is not this
        holder's, REFUSED when the page needs a slot of another size. All but STORED gives the slot
        back, an expired one too: who names a grant has stopped writing there. ValueError for
        numbers that the table cannot hold and for sequences of two lengths; nothing has changed.

        All pages of a call are sealed after the parents that were there before it were used.
        """
        if len(generations) != len(metas):
            raise ValueError(f"{len(generations)} grants for {len(metas)} pages")
        residents, stale = self._residents, PutCode.STALE_GENERATION
        residents.check_name(namespace, shard)
        keys = [meta.key for meta in metas]
        with self._lock:
            heads = self._heads(namespace, shard, keys)
            is_open = namespace in self._open_namespaces
            rows = self._let_go(holder, generations)
            codes = bytearray(
                self._judge(row, meta, heads[meta.key]) if is_open else stale
                for row, meta in zip(rows, metas, strict=True)
            )
            goes_in = [meta for code, meta in zip(codes, metas, strict=True) if code == _STORED]
            self._use_parents(namespace, shard, goes_in, heads)
            for i, (row, meta) in enumerate(zip(rows, metas, strict=True)):
                if codes[i] == _STORED:
                    residents.name(row, namespace, shard, meta)
                    codes[i] = self._seal(row, meta, heads.pop(meta.key, None))
                elif row != NO_ROW:
                    self._free(row)
            self._count(codes)
        return np.frombuffer(codes, np.uint8)

    def give_back(self, holder: int, generations: Sequence[int]) -> int:
        """Frees grants of this holder, expired ones too; how many. It does not write there any
        more."""
        with self._lock:
            rows = [row for row in self._let_go(holder, generations) if row != NO_ROW]
            for row in rows:
                self._free(row)
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
            for row in rows:
                self._free(row)
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

    def _grant(self, holder: int, row: int, record_bytes: int) -> PageRef:
        ref = self._ref(row)
        held = self._held.setdefault(holder, _Held())
        held.rows[ref.generation] = row
        held.nbytes += record_bytes
        self._granted_pages += 1
        self._granted_bytes += record_bytes
        return ref

    def _end_at(self, deadline: float, holder: int, refs: Sequence[PageRef]) -> None:
        if refs:
            self._takes += 1
            generations = [ref.generation for ref in refs]
            heapq.heappush(self._deadlines, (deadline, self._takes, holder, generations))

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
            if state[row] == State.FILLING:
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

    def _free(self, row: int) -> None:
        """Nobody writes there any more."""
        if self._residents.table.state[row] == State.FILLING:
            self._residents.abandon(row)
        else:
            self._residents.drain(row)

    def _is_live(self, row: int) -> bool:
        return (
            row != NO_ROW
            and self._residents.table.state[row] == State.FILLING
            and self._residents.is_lasting(row)
        )

    def _judge(self, row: int, meta: PageMeta, head: int) -> PutCode:
        """What becomes of a page by what there was before this call; STORED: it can be sealed."""
        if not self._is_live(row):
            return PutCode.STALE_GENERATION
        if self._residents.table.record[row] != record_bytes_of(meta.length):
            return PutCode.REFUSED
        if head != NO_ROW and self._residents.is_there(head, meta):
            return PutCode.EXISTS
        return PutCode.STORED

    def _seal(self, row: int, meta: PageMeta, head: int | None) -> PutCode:
        """`head` is None for a page that this call has sealed already."""
        residents, table = self._residents, self._residents.table
        if head is None:
            head = residents.index.find(table.namespace[row], table.shard[row], meta.key)
            if residents.is_there(head, meta):
                self._free(row)
                return PutCode.EXISTS
        residents.seal(row, meta, head)
        return PutCode.STORED

    def _heads(self, namespace: int, shard: int, keys: list[bytes]) -> dict[bytes, int]:
        """The best copy of each page, or NO_ROW."""
        array = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
        rows = self._residents.index.find_many(namespace, shard, array)
        return dict(zip(keys, rows.tolist(), strict=True))

    def _use_parents(
        self, namespace: int, shard: int, metas: Sequence[PageMeta], heads: Mapping[bytes, int]
    ) -> None:
        """A page that goes on is in use, as in `Store.reserve`. Most pages of a call come after
        another one of it."""
        find = self._residents.index.find
        rows = []
        for parent in dict.fromkeys(meta.parent for meta in metas):
            row = heads.get(parent)
            if row is None:
                row = find(namespace, shard, parent) if parent else NO_ROW
            if row != NO_ROW:
                rows.append(row)
        if rows:
            self._residents.touch(np.array(rows))

    def _count(self, codes: bytearray) -> None:
        self._counters.stored += codes.count(PutCode.STORED)
        self._counters.exists += codes.count(PutCode.EXISTS)
        self._counters.stale_commits += codes.count(PutCode.STALE_GENERATION)

    def _ref(self, row: int) -> PageRef:
        table = self._residents.table
        return PageRef(self._boot_id, _TIER, table.slot[row], table.generation[row])
