"""A hypothesis machine that drives a store against an independent oracle.

The oracle (store_oracle.py) is a set of the pages that may be found, with their chains, uses and
leases, kept by its own rules and none of the store's helpers; grant_rules.py has the rules for
slots that are granted ahead of time. Held after every step: found <=> the oracle says so; a page
leaves only when there is no room, only one, and exactly the least recently used of those that
nothing keeps; BUSY only when everything is kept; one put of a key wins; the three books of every
tier agree; nothing is findable after its namespace ended.

Use: `StoreMachine.make_store` must return a store with namespace 1 open, whose host tier takes
records of `record_bytes`; then `TestStore = StoreMachine.TestCase`.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, invariant, rule

from kvtier.core.handles import Filling, Reading
from kvtier.core.page import DeleteCode, GetCode, LeaseCode, PutCode, Tier
from kvtier.testing.grant_rules import GrantRules
from kvtier.testing.listing_book import ListingBook
from kvtier.testing.store_oracle import KEYS, NUMBERS, meta_of

__all__ = ["StoreMachine"]

_batches = st.lists(NUMBERS, min_size=1, max_size=6)


class StoreMachine(GrantRules):
    fillings = Bundle("fillings")
    readings = Bundle("readings")
    leases = Bundle("leases")

    # -- writing ------------------------------------------------------------------------------

    @rule(target=fillings, n=NUMBERS, parent=st.none() | NUMBERS)
    def reserve(self, n: int, parent: int | None) -> tuple[int, int | None, Filling] | None:
        room = self.has_room()
        meta = meta_of(n, parent, self.ttl_ms)
        outcome = self.store.reserve(self.namespace, 0, meta, self.record_bytes)
        code = outcome if isinstance(outcome, PutCode) else None
        if parent in self.there and code is not PutCode.EXISTS:
            self.touch([parent])
        self.make_way(room=room, code=code)
        if isinstance(outcome, PutCode):
            assert outcome in (PutCode.EXISTS, PutCode.BUSY)
            assert (outcome is PutCode.EXISTS) == (n in self.there)
            return None
        assert n not in self.there
        self.is_new(outcome.ref.generation)
        return n, parent, outcome

    @rule(filling=consumes(fillings))
    def seal(self, filling: tuple[int, int | None, Filling] | None) -> None:
        if filling is None:
            return
        n, parent, handle = filling
        code = handle.seal()
        if handle.namespace != self.namespace:
            assert code is PutCode.STALE_GENERATION
        elif n in self.there:
            assert code is PutCode.EXISTS
        else:
            assert code is PutCode.STORED
            self.stored(n, parent)

    @rule(filling=consumes(fillings), how=st.sampled_from(["abandon", "orphan"]))
    def give_up(self, filling: tuple[int, int | None, Filling] | None, how: str) -> None:
        if filling is not None:
            handle = filling[2]
            getattr(handle, how)()
            if how == "orphan":
                self.orphans.append(handle)

    @rule()
    def settle_orphans(self) -> None:
        """Their writers have stopped."""
        for handle in self.orphans:
            assert self.store.settle_orphan(handle.ref)
            assert not self.store.settle_orphan(handle.ref)
        self.orphans.clear()

    # -- reading ------------------------------------------------------------------------------

    @rule(target=readings, numbers=_batches)
    def acquire(self, numbers: list[int]) -> list[tuple[int, Reading]]:
        outcomes = self.store.acquire(self.namespace, 0, KEYS[numbers])
        self.touch([n for n in numbers if n in self.there])
        held = []
        for n, outcome in zip(numbers, outcomes, strict=True):
            if isinstance(outcome, Reading):
                assert n in self.there
                held.append((n, outcome))
                self.read_count[n] = self.read_count.get(n, 0) + 1
            else:
                assert outcome is GetCode.MISS
                assert n not in self.there
        return held

    @rule(held=consumes(readings))
    def release(self, held: list[tuple[int, Reading]]) -> None:
        for n, reading in held:
            reading.release()
            if self.read_count.get(n):
                self.read_count[n] -= 1

    @rule(numbers=_batches)
    def condemn(self, numbers: list[int]) -> None:
        outcomes = self.store.acquire(self.namespace, 0, KEYS[numbers])
        self.touch([n for n in numbers if n in self.there])
        for n, outcome in zip(numbers, outcomes, strict=True):
            if isinstance(outcome, Reading):
                assert self.store.condemn(outcome.ref) == (n in self.there)
                outcome.release()
                self.forget(n)

    # -- leases -------------------------------------------------------------------------------

    @rule(target=leases, numbers=_batches, ttl=st.integers(1, 9))
    def pin(self, numbers: list[int], ttl: int) -> int:
        deadline = self.now + ttl
        lease, codes = self.store.pins.pin(5, self.namespace, 0, KEYS[numbers], deadline=deadline)
        held = [n for n in numbers if n in self.there]
        assert [n for n, code in zip(numbers, codes, strict=True) if code == GetCode.HIT] == held
        assert bool(lease) == bool(held)
        self.touch(held)
        if lease:
            self.live_leases[lease] = deadline, list(held)
        return lease

    @rule(lease=leases)
    def unpin(self, lease: int) -> None:
        self.expire_oracle()
        (code,) = self.store.pins.unpin(5, [lease], now=self.now)
        if self.live_leases.pop(lease, None):
            assert code is LeaseCode.RELEASED
        else:
            assert code in (LeaseCode.EXPIRED, LeaseCode.UNKNOWN)

    @rule(lease=leases, ttl=st.integers(1, 9))
    def renew(self, lease: int, ttl: int) -> None:
        self.expire_oracle()
        deadline = self.now + ttl
        (code,) = self.store.pins.renew(5, [lease], deadline=deadline, now=self.now)
        assert (code is LeaseCode.HELD) == (lease in self.live_leases)
        if lease in self.live_leases:
            self.live_leases[lease] = deadline, self.live_leases[lease][1]

    @rule(seconds=st.integers(1, 6))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.expire_oracle()
        self.store.forecasts.tell_time(self.now)
        self.store.pins.expire(self.now)
        self.expire_grants()

    @rule()
    def end_session(self) -> None:
        self.expire_oracle()
        self.store.pins.expire(self.now)
        assert self.store.pins.end_session(5) == len(self.live_leases)
        self.live_leases.clear()

    def expire_oracle(self) -> None:
        for lease, (deadline, _) in list(self.live_leases.items()):
            if deadline <= self.now:
                del self.live_leases[lease]

    # -- removing -----------------------------------------------------------------------------

    @rule(numbers=_batches)
    def delete(self, numbers: list[int]) -> None:
        codes = self.store.delete(self.namespace, 0, KEYS[numbers]).tolist()
        # The store works from the last key back, so a key given twice is DELETED at its last place.
        last = {n: i for i, n in enumerate(numbers)}
        for i, n in enumerate(numbers):
            gone = n in self.there and last[n] == i
            assert codes[i] == (DeleteCode.DELETED if gone else DeleteCode.ABSENT)
        for n in numbers:
            self.forget(n)

    @rule()
    def bump(self) -> None:
        old = self.namespace
        self.store.end_namespace(old)
        codes, _ = self.store.lookup(old, 0, KEYS)
        assert set(codes.tolist()) == {GetCode.STALE}
        self.is_unswept = True
        self.namespace += 1
        self.store.open_namespace(self.namespace, 1)
        for n in list(self.there):
            self.forget(n)

    @rule(pages=st.integers(1, 4))
    def sweep(self, pages: int) -> None:
        swept = self.store.sweep(pages)
        assert swept <= pages
        if swept == 0:
            self.is_unswept = False

    # -- always -------------------------------------------------------------------------------

    @invariant()
    def found_is_what_the_oracle_says(self) -> None:
        assert self.found() == self.there

    @invariant()
    def books_agree(self) -> None:
        self.store.survey.check()
        if isinstance(self.store._listing, ListingBook):
            self.store._listing.check(self.store)
        counts = self.store.status()[Tier.HOST]
        assert counts.sealed >= len(self.there)
        assert counts.free_bytes + counts.used_bytes == counts.capacity_bytes
