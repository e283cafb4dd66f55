"""Rules of the store machine for slots that are granted ahead of time, and what holds for them.

A slot that was granted is nobody else's until its holder has named it in a seal, given it back, or
is known to have ended: the books of the store, held against each other after every step, show any
other use of it.
"""

from __future__ import annotations

from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kvtier.core.page import PageRef, PutCode, Tier
from kvtier.core.page_columns import PageColumns
from kvtier.testing.store_oracle import NUMBERS, StoreOracle, meta_of

__all__ = ["GrantRules"]

_HOLDERS = st.integers(1, 2)
#: Places in the list of all grants.
_picks = st.lists(st.integers(0, 7), min_size=1, max_size=4)
_named = st.lists(
    st.tuples(st.integers(0, 7), NUMBERS, st.none() | NUMBERS), min_size=1, max_size=4
)


class GrantRules(StoreOracle):
    """`grants_share` and `quarantine_share` are those of the store's configuration."""

    grants_share: ClassVar[float] = 0.02
    quarantine_share: ClassVar[float] = 0.05

    def __init__(self) -> None:
        super().__init__()
        # generation -> (holder, slot, deadline); None: it has expired
        self.grants: dict[int, tuple[int, PageRef, float | None]] = {}

    # -- the oracle ---------------------------------------------------------------------------

    def may_take(self, holder: int) -> bool:
        capacity = self.store.status()[Tier.HOST].capacity_bytes
        expired = sum(deadline is None for _, _, deadline in self.grants.values())
        orphaned = (expired + len(self.orphans)) * self.record_bytes
        if orphaned >= int(capacity * self.quarantine_share):
            return False
        held = sum(owner == holder for owner, _, _ in self.grants.values())
        return not held or (held + 1) * self.record_bytes <= int(capacity * self.grants_share)

    def named(self, picks: list[int]) -> list[int]:
        """Generations: of any holder's grants, or of none."""
        known = [*sorted(self.grants), 0]
        return [known[pick % len(known)] for pick in picks]

    def owns(self, holder: int, generation: int) -> bool:
        return generation in self.grants and self.grants[generation][0] == holder

    def expire_grants(self) -> None:
        count = self.store.grants.expire(self.now)
        late = [
            generation
            for generation, (_, _, deadline) in self.grants.items()
            if deadline is not None and deadline <= self.now
        ]
        assert count == len(late)
        for generation in late:
            self.grants[generation] = (*self.grants[generation][:2], None)

    # -- rules --------------------------------------------------------------------------------

    @rule(holder=_HOLDERS, count=st.integers(1, 3), ttl=st.integers(1, 9))
    def take(self, holder: int, count: int, ttl: int) -> None:
        for _ in range(count):
            room, may = self.has_room(), self.may_take(holder)
            deadline = self.now + ttl
            refs = self.store.grants.take(holder, self.record_bytes, 1, deadline=deadline)
            if not may:
                assert refs == []
                assert self.found() == self.there, "a page gave way for nothing"
                continue
            self.make_way(room=room, code=None if refs else PutCode.BUSY)
            for ref in refs:
                self.is_new(ref.generation)
                slots = {other.slot for _, other, _ in self.grants.values()}
                assert ref.slot not in slots, "a slot was granted twice"
                self.grants[ref.generation] = holder, ref, deadline

    @rule(holder=_HOLDERS, pages=_named)
    def seal_granted(self, holder: int, pages: list[tuple[int, int, int | None]]) -> None:
        generations = self.named([pick for pick, _, _ in pages])
        metas = [meta_of(n, parent, self.ttl_ms) for _, n, parent in pages]
        codes = self.store.grants.seal_many(
            holder, self.namespace, 0, generations, PageColumns.of(metas)
        ).tolist()
        goes_in = []
        for generation, (_, n, _) in zip(generations, pages, strict=True):
            is_live = self.owns(holder, generation) and self.grants[generation][2] is not None
            goes_in.append(is_live and n not in self.there)
            if self.owns(holder, generation):
                del self.grants[generation]
            if not is_live:
                assert codes[len(goes_in) - 1] == PutCode.STALE_GENERATION
            elif not goes_in[-1]:
                assert codes[len(goes_in) - 1] == PutCode.EXISTS
        going = [page for page, goes in zip(pages, goes_in, strict=True) if goes]
        parents = dict.fromkeys(parent for _, _, parent in going)
        self.touch([n for n in parents if n in self.there])
        for i, (_, n, parent) in enumerate(pages):
            if goes_in[i]:
                is_first = n not in self.there
                assert codes[i] == (PutCode.STORED if is_first else PutCode.EXISTS)
                if is_first:
                    self.stored(n, parent)

    @rule(holder=_HOLDERS, picks=_picks)
    def seal_too_late(self, holder: int, picks: list[int]) -> None:
        """Under a number that has ended, or was never open."""
        generations = self.named(picks)
        metas = [meta_of(n, None) for n in range(len(picks))]
        codes = self.store.grants.seal_many(
            holder, self.namespace - 1, 0, generations, PageColumns.of(metas)
        )
        assert set(codes.tolist()) == {PutCode.STALE_GENERATION}
        for generation in generations:
            if self.owns(holder, generation):
                del self.grants[generation]

    @rule(holder=_HOLDERS, picks=_picks)
    def give_grants_back(self, holder: int, picks: list[int]) -> None:
        generations = self.named(picks)
        own = {generation for generation in generations if self.owns(holder, generation)}
        assert self.store.grants.give_back(holder, generations) == len(own)
        for generation in own:
            del self.grants[generation]

    @rule(holder=_HOLDERS)
    def end_holder(self, holder: int) -> None:
        """Its connection is gone: all that it holds counts as expired."""
        for generation, (owner, ref, _) in self.grants.items():
            if owner == holder:
                self.grants[generation] = owner, ref, None
        held = sum(owner == holder for owner, _, _ in self.grants.values())
        assert self.store.grants.end(holder) == held

    @rule(holder=_HOLDERS)
    def settle_holder(self, holder: int) -> None:
        """Its process has ended."""
        own = [generation for generation in self.grants if self.owns(holder, generation)]
        assert self.store.grants.settle(holder) == len(own)
        for generation in own:
            del self.grants[generation]

    # -- always -------------------------------------------------------------------------------

    @invariant()
    def grants_are_what_the_oracle_says(self) -> None:
        grants = self.store.grants
        for holder in (1, 2):
            found = grants.refs(holder, list(self.grants))
            for ref, (owner, slot, deadline) in zip(found, self.grants.values(), strict=True):
                is_live = owner == holder and deadline is not None
                assert ref == (slot if is_live else None)
        expired = sum(deadline is None for _, _, deadline in self.grants.values())
        assert grants.granted_pages == len(self.grants) - expired
        assert grants.granted_bytes == grants.granted_pages * self.record_bytes
        assert grants.quarantined_bytes == expired * self.record_bytes
        counts = self.store.status()[Tier.HOST]
        assert counts.filling >= grants.granted_pages
        assert counts.quarantined >= expired
        for _, slot, _ in self.grants.values():
            assert not self.store.settle_orphan(slot), "a grant was taken from its holder"
