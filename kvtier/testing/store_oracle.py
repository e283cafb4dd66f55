"""What a store must say, kept by rules of its own: the pages that may be found, with their chains,
uses and leases.

None of the store's helpers is used here. The machine of store_machine.py asks the store and this
the same questions; one thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from kvtier.core.handles import Filling
from kvtier.core.page import NO_SUM, Codec, GetCode, PageMeta, PutCode, Tier
from kvtier.core.store import Store

__all__ = ["KEYS", "NUMBERS", "UNIVERSE", "StoreOracle", "key_of", "meta_of"]

UNIVERSE = 24


def key_of(n: int) -> bytes:
    return hashlib.sha256(b"machine%d" % n).digest()


def meta_of(n: int, parent: int | None, ttl_ms: int = 0) -> PageMeta:
    """Page `n`, with a payload of 64 bytes."""
    return PageMeta(
        key=key_of(n),
        length=64,
        codec=Codec.RAW,
        payload_sum=NO_SUM,
        parent=b"" if parent is None else key_of(parent),
        ttl_ms=ttl_ms,
    )


KEYS: npt.NDArray[np.uint8] = np.frombuffer(
    b"".join(key_of(n) for n in range(UNIVERSE)), np.uint8
).reshape(-1, 32)
NUMBERS = st.integers(0, UNIVERSE - 1)


class StoreOracle(RuleBasedStateMachine):
    """See StoreMachine."""

    make_store: ClassVar[Callable[[], Store]]
    record_bytes: ClassVar[int] = 8192
    ttl_ms: ClassVar[int] = 0  # what every put says

    def __init__(self) -> None:
        super().__init__()
        self.store = type(self).make_store()
        self.namespace = 1
        self.now = 0.0
        self.there: set[int] = set()
        self.read_count: dict[int, int] = {}
        self.live_leases: dict[int, tuple[float, list[int]]] = {}
        self.last_generation = 0
        self.clock = 0
        self.is_unswept = False
        self.used: dict[int, int] = {}
        self.parent_of: dict[int, int] = {}
        self.waits_for: dict[int, int] = {}  # page -> the page before it, which was not there
        self.orphans: list[Filling] = []

    def found(self) -> set[int]:
        codes, _ = self.store.lookup(self.namespace, 0, KEYS)
        return set(np.flatnonzero(codes == GetCode.HIT.value).tolist())

    def pinned(self) -> set[int]:
        held = {n for n, count in self.read_count.items() if count}
        for _, numbers in self.live_leases.values():
            held.update(numbers)
        return held & self.there

    def touch(self, numbers: list[int]) -> None:
        """Used together, from the head of a chain to its tail: the head counts as used last."""
        for i, n in enumerate(numbers):
            self.used[n] = self.clock + len(numbers) - i
        self.clock += len(numbers)

    def candidates(self) -> set[int]:
        """Pages that nothing keeps."""
        parents = {self.parent_of.get(n) for n in self.there}
        return self.there - self.pinned() - parents

    def has_room(self) -> bool:
        return self.store.status()[Tier.HOST].free_bytes >= self.record_bytes

    def make_way(self, *, room: bool, code: PutCode | None) -> None:
        """What a reserve may have taken: nothing, or the one page whose turn it was."""
        now_there = self.found()
        assert now_there <= self.there, "a page came from nowhere"
        assert self.pinned() <= now_there, "a pinned page was evicted"
        left = self.there - now_there
        if room or code is PutCode.EXISTS:
            assert left == set(), "a page left although there was room"
            assert code is not PutCode.BUSY, "BUSY although there was room"
            return
        candidates = self.candidates()
        if code is PutCode.BUSY:
            assert candidates == set(), "BUSY although a page could have given way"
        elif not (self.is_unswept and left == set()):  # pages of an ended namespace may go first
            assert left == {min(candidates, key=self.used.__getitem__)}, "another page's turn"
        for n in left:
            self.forget(n)

    def is_new(self, generation: int) -> None:
        assert generation > self.last_generation, "a generation came twice"
        self.last_generation = generation

    def stored(self, n: int, parent: int | None) -> None:
        """Page `n` has become findable: it comes after its parent, and those that wait for it come
        after it. A page whose chain would be a ring has no parent."""
        self.there.add(n)
        self.touch([n])
        self.waits_for.pop(n, None)
        if parent is not None:
            self.waits_for[n] = parent
        children = [child for child, awaited in self.waits_for.items() if awaited == n]
        for child in (n, *children):
            awaited = self.waits_for.get(child)
            if awaited in self.there:
                del self.waits_for[child]
                if child not in self.upwards(awaited):
                    self.parent_of[child] = awaited

    def upwards(self, n: int) -> set[int]:
        """The page and all before it."""
        found = {n}
        while (before := self.parent_of.get(n)) is not None:
            found.add(before)
            n = before
        return found

    def forget(self, n: int) -> None:
        """The page of that number is gone; what still reads or leases it names an older life."""
        self.there.discard(n)
        self.read_count.pop(n, None)
        self.parent_of.pop(n, None)
        self.waits_for.pop(n, None)
        for child in [c for c, parent in self.parent_of.items() if parent == n]:
            del self.parent_of[child]
        for _, numbers in self.live_leases.values():
            while n in numbers:
                numbers.remove(n)
