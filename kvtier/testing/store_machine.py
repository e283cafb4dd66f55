"""A hypothesis machine that drives a store against an independent oracle.

The oracle is a dict of the pages that may be found, kept by its own rules and none of the store's
helpers. Held after every step: found <=> the oracle says so; pages leave only to make room, and
then never a pinned one; one put of a key wins; the three books of every tier agree; nothing is
findable after its namespace ended.

Use: `StoreMachine.make_store` must return a store with namespace 1 open, whose host tier takes
records of `record_bytes`; then `TestStore = StoreMachine.TestCase`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvtier.core.handles import Filling, Reading
from kvtier.core.page import (
    NO_SUM,
    Codec,
    DeleteCode,
    GetCode,
    LeaseCode,
    PageMeta,
    PutCode,
    Tier,
)
from kvtier.core.store import Store

__all__ = ["StoreMachine"]

_UNIVERSE = 24


def _key(n: int) -> bytes:
    return hashlib.sha256(b"machine%d" % n).digest()


_KEYS: npt.NDArray[np.uint8] = np.frombuffer(
    b"".join(_key(n) for n in range(_UNIVERSE)), np.uint8
).reshape(-1, 32)
_numbers = st.integers(0, _UNIVERSE - 1)
_batches = st.lists(_numbers, min_size=1, max_size=6)


class StoreMachine(RuleBasedStateMachine):
    make_store: ClassVar[Callable[[], Store]]
    record_bytes: ClassVar[int] = 8192

    fillings = Bundle("fillings")
    readings = Bundle("readings")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.store = type(self).make_store()
        self.namespace = 1
        self.now = 0.0
        self.there: set[int] = set()
        self.read_count: dict[int, int] = {}
        self.live_leases: dict[int, tuple[float, list[int]]] = {}
        self.last_generation = 0

    # -- the oracle ---------------------------------------------------------------------------

    def found(self) -> set[int]:
        codes, _ = self.store.lookup(self.namespace, 0, _KEYS)
        return {n for n in range(_UNIVERSE) if codes[n] == GetCode.HIT}

    def pinned(self) -> set[int]:
        held = {n for n, count in self.read_count.items() if count}
        for _, numbers in self.live_leases.values():
            held.update(numbers)
        return held & self.there

    def make_way(self) -> None:
        """After a reserve, pages may have left, but none that is in use."""
        now_there = self.found()
        assert now_there <= self.there, "a page came from nowhere"
        assert self.pinned() <= now_there, "a pinned page was evicted"
        self.there = now_there

    # -- writing ------------------------------------------------------------------------------

    @rule(target=fillings, n=_numbers, parent=st.none() | _numbers)
    def reserve(self, n: int, parent: int | None) -> tuple[int, Filling] | None:
        meta = PageMeta(
            key=_key(n),
            length=64,
            codec=Codec.RAW,
            payload_sum=NO_SUM,
            parent=b"" if parent is None else _key(parent),
        )
        outcome = self.store.reserve(self.namespace, 0, meta, self.record_bytes)
        self.make_way()
        if isinstance(outcome, PutCode):
            assert outcome in (PutCode.EXISTS, PutCode.BUSY)
            assert (outcome is PutCode.EXISTS) == (n in self.there)
            return None
        assert n not in self.there
        assert outcome.ref.generation > self.last_generation, "a generation came twice"
        self.last_generation = outcome.ref.generation
        return n, outcome

    @rule(filling=consumes(fillings))
    def seal(self, filling: tuple[int, Filling] | None) -> None:
        if filling is None:
            return
        n, handle = filling
        code = handle.seal()
        if handle.namespace != self.namespace:
            assert code is PutCode.STALE_GENERATION
        elif n in self.there:
            assert code is PutCode.EXISTS
        else:
            assert code is PutCode.STORED
            self.there.add(n)

    @rule(filling=consumes(fillings), how=st.sampled_from(["abandon", "orphan"]))
    def give_up(self, filling: tuple[int, Filling] | None, how: str) -> None:
        if filling is not None:
            getattr(filling[1], how)()

    # -- reading ------------------------------------------------------------------------------

    @rule(target=readings, numbers=_batches)
    def acquire(self, numbers: list[int]) -> list[tuple[int, Reading]]:
        outcomes = self.store.acquire(self.namespace, 0, _KEYS[numbers])
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
        for n, outcome in zip(
            numbers, self.store.acquire(self.namespace, 0, _KEYS[numbers]), strict=True
        ):
            if isinstance(outcome, Reading):
                assert self.store.condemn(outcome.ref) == (n in self.there)
                outcome.release()
                self.forget(n)

    # -- leases -------------------------------------------------------------------------------

    @rule(target=leases, numbers=_batches, ttl=st.integers(1, 9))
    def pin(self, numbers: list[int], ttl: int) -> int:
        deadline = self.now + ttl
        lease, codes = self.store.pins.pin(5, self.namespace, 0, _KEYS[numbers], deadline=deadline)
        held = [n for n in numbers if n in self.there]
        assert [n for n, code in zip(numbers, codes, strict=True) if code == GetCode.HIT] == held
        assert bool(lease) == bool(held)
        if lease:
            self.live_leases[lease] = deadline, held
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
        self.store.pins.expire(self.now)

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
        codes = self.store.delete(self.namespace, 0, _KEYS[numbers]).tolist()
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
        codes, _ = self.store.lookup(old, 0, _KEYS)
        assert set(codes.tolist()) == {GetCode.STALE}
        self.namespace += 1
        self.store.open_namespace(self.namespace, 1)
        for n in list(self.there):
            self.forget(n)

    @rule(pages=st.integers(1, 4))
    def sweep(self, pages: int) -> None:
        assert self.store.sweep(pages) <= pages

    def forget(self, n: int) -> None:
        """The page of that number is gone; what still reads or leases it names an older life."""
        self.there.discard(n)
        self.read_count.pop(n, None)
        for _, numbers in self.live_leases.values():
            while n in numbers:
                numbers.remove(n)

    # -- always -------------------------------------------------------------------------------

    @invariant()
    def found_is_what_the_oracle_says(self) -> None:
        assert self.found() == self.there

    @invariant()
    def books_agree(self) -> None:
        self.store.check()
        counts = self.store.status()[Tier.HOST]
        assert counts.sealed >= len(self.there)
        assert counts.free_bytes + counts.used_bytes == counts.capacity_bytes
