"""Index, slabs, generations, namespaces and leases against plain models."""

from __future__ import annotations

import gc
import hashlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.generations import BLOCK, Generations
from kvtier.core.index import Index
from kvtier.core.lifecycle import Event, fire_many
from kvtier.core.namespaces import FamilyIdentity, Namespaces, ShardIdentity
from kvtier.core.page import Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.table import BYTES_PER_ROW, NO_ROW, CopyTable
from kvtier.errors import GenerationConflict, LimitExceeded, NamespaceMismatch, UnknownNamespace
from tests.core.support import take_row


class IndexModel:
    """The index beside a dict of the same contents."""

    def __init__(self, rows_max: int, seed: int) -> None:
        self.table = CopyTable(rows_max)
        self.index = Index(self.table, seed=seed)
        self.rows: dict[tuple[int, int, bytes], int] = {}
        self.generation = 0

    def add(self, namespace: int, shard: int, key: bytes) -> None:
        if (namespace, shard, key) in self.rows:
            return
        row = take_row(self.table, key)
        if row == NO_ROW:
            return
        self.generation += 1
        self.table.namespace[row] = namespace
        self.table.shard[row] = shard
        self.table.tier[row] = Tier.HOST
        fire_many(self.table, (row,), Event.RESERVE, generations=(self.generation,))
        fire_many(self.table, (row,), Event.SEAL)
        self.index.insert(row)
        self.rows[namespace, shard, key] = row

    def drop(self, namespace: int, shard: int, key: bytes) -> None:
        row = self.rows.pop((namespace, shard, key), None)
        if row is not None:
            assert self.index.remove_many((row,)) == [True]
            fire_many(self.table, (row,), Event.RETIRE)
            fire_many(self.table, (row,), Event.DRAIN)
            self.table.give_rows((row,))


def awkward_key(n: int) -> bytes:
    """Keys that differ in one word or bit alone, as no hash would give."""
    if n % 2:
        return n.to_bytes(32, "little")
    return bytes(31 - n % 32) + b"\x80" + bytes(n % 32)


@given(
    ops=st.lists(
        st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 1), st.integers(0, 40))
    ),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=200, deadline=None)
def test_index_equals_a_dict(ops: list[tuple[bool, int, int, int]], seed: int) -> None:
    model = IndexModel(24, seed)
    for is_add, namespace, shard, n in ops:
        change = model.add if is_add else model.drop
        change(namespace, shard, awkward_key(n))
    keys = np.frombuffer(b"".join(awkward_key(n) for n in range(41)), np.uint8).reshape(-1, 32)
    for namespace in range(4):
        for shard in range(2):
            expected = [
                model.rows.get((namespace, shard, awkward_key(n)), NO_ROW) for n in range(41)
            ]
            assert model.index.find_many(namespace, shard, keys).tolist() == expected
            assert [
                model.index.find(namespace, shard, awkward_key(n)) for n in range(41)
            ] == expected
            assert model.index.find_many(namespace, shard, keys[:5]).tolist() == expected[:5]
    assert model.index.pages == len(model.rows)


def test_a_key_is_compared_in_full() -> None:
    """One flipped bit anywhere in key, namespace or shard is another page."""
    model = IndexModel(600, seed=3)
    base = hashlib.sha256(b"base").digest()
    model.add(1, 1, base)
    for bit in range(256):
        other = bytearray(base)
        other[bit // 8] ^= 1 << (bit % 8)
        assert model.index.find(1, 1, bytes(other)) == NO_ROW
    assert model.index.find(2, 1, base) == NO_ROW
    assert model.index.find(1, 2, base) == NO_ROW
    assert model.index.find(1, 1, base) != NO_ROW


def test_a_row_costs_few_bytes_and_no_objects() -> None:
    assert BYTES_PER_ROW <= 128
    gc.collect()
    before = len(gc.get_objects())
    model = IndexModel(20_000, seed=1)
    for n in range(20_000):
        model.add(1, 0, hashlib.sha256(n.to_bytes(4, "little")).digest())
    model.rows.clear()
    gc.collect()
    assert len(gc.get_objects()) - before < 200


def test_rows_are_reused_last_freed_first_and_run_out_cleanly() -> None:
    table = CopyTable(3)
    assert [table.take_many(1) for _ in range(4)] == [[0], [1], [2], []]
    table.give_rows((1,))
    table.give_rows((0,))
    assert [table.take_many(1) for _ in range(3)] == [[0], [1], []]


@given(
    ops=st.lists(
        st.tuples(st.booleans(), st.sampled_from([8192, 12288, 65536]), st.integers(0, 99))
    ),
    granted=st.integers(0, 4),
)
@settings(max_examples=200, deadline=None)
def test_slots_never_overlap_and_always_add_up(
    ops: list[tuple[bool, int, int]], granted: int
) -> None:
    allocator = SlabAllocator(slab_bytes=131_072, numbers=range(4))
    for slab in range(granted):
        allocator.grant(slab)
    taken: dict[int, int] = {}
    for is_take, size, pick in ops:
        if is_take:
            for slot in allocator.reserve_many(size, 1):
                assert allocator.slab_of(slot) < granted
                taken[slot] = size
        elif taken:
            slot = sorted(taken)[pick % len(taken)]
            allocator.free_many((slot,))
            del taken[slot]
        ends = sorted((slot * 4096, slot * 4096 + size) for slot, size in taken.items())
        assert all(a[1] <= b[0] for a, b in pairwise(ends))
        counts = allocator.counts()
        assert counts.used == sum(taken.values())
        total = counts.ungranted + counts.unbound + counts.used + counts.free + counts.tails
        assert total == allocator.capacity_bytes == 4 * 131_072
    allocator.free_many(taken)
    if granted:  # everything can be had again in any one size
        for size in (65536, 8192):
            slots = []
            while more := allocator.reserve_many(size, 1):
                slots += more
            assert len(slots) == granted * (131_072 // size)
            for slot in slots:
                allocator.free_many((slot,))


def test_slots_above_16_tib_are_named_exactly() -> None:
    slab = 1 << 40
    allocator = SlabAllocator(slab_bytes=slab, numbers=range(20))
    for slab_no in range(20):
        allocator.grant(slab_no)
    slots = [slot for _ in range(20) for slot in allocator.reserve_many(slab, 1)]
    assert sorted(slots) == [n * (1 << 28) for n in range(20)]


def test_generations_are_journalled_before_they_are_used_and_never_reused() -> None:
    bounds: list[int] = []
    counter = Generations(41, bounds.append)
    assert bounds == []
    assert [counter.next() for _ in range(3)] == [42, 43, 44]
    assert bounds == [41 + BLOCK]
    after_crash = Generations(bounds[-1], bounds.append)
    assert after_crash.next() > bounds[0]
    for _ in range(BLOCK):
        last = after_crash.next()
    assert len(bounds) == 3
    assert last <= bounds[-1]


def identity(n: int = 0, **more: object) -> FamilyIdentity:
    fields = {
        "fingerprint": bytes([n]) * 32,
        "tenant": "acme",
        "model_id": "m",
        "weights_revision": "r1",
        "shard_count": 2,
    }
    return FamilyIdentity(**(fields | more))  # type: ignore[arg-type]


SHARD = ShardIdentity(index=0, layers=(0, 8), heads=(0, 4))


def test_a_shard_must_be_opened_with_the_same_cut() -> None:
    names = Namespaces(namespaces_max=4)
    names.open(identity(), SHARD)
    names.open(identity(), ShardIdentity(index=1, layers=(0, 8), heads=(4, 8)))
    with pytest.raises(NamespaceMismatch, match=r"shard 0 heads: .*\(0, 4\).*\(0, 2\)"):
        names.open(identity(), ShardIdentity(index=0, layers=(0, 8), heads=(0, 2)))
    with pytest.raises(NamespaceMismatch, match="shard 0 layers"):
        names.open(identity(), ShardIdentity(index=0, layers=(0, 4), heads=(0, 4)))


def test_bump_is_compare_and_set_and_idempotent_by_token() -> None:
    names = Namespaces(namespaces_max=4)
    number = names.open(identity(), SHARD).number
    family, ended = names.bump(bytes(32), expected=1, weights_revision="r2", token=b"t" * 16)
    assert (family.generation, ended, family.number) == (2, number, number + 1)
    again, ended = names.bump(bytes(32), expected=1, weights_revision="r2", token=b"t" * 16)
    assert (again.generation, ended) == (2, None)
    with pytest.raises(GenerationConflict, match="at generation 2, not 1"):
        names.bump(bytes(32), expected=1, weights_revision="r3", token=b"u" * 16)
    assert names.current(number) is None
    with pytest.raises(NamespaceMismatch, match=r"weights_revision: .*'r2'.*'r1'"):
        names.open(identity(), SHARD)
    names.bump(bytes(32), expected=2, weights_revision="r1", token=b"v" * 16)
    assert names.open(identity(), SHARD).generation == 3


def test_a_deleted_family_never_meets_its_old_generation_again() -> None:
    names = Namespaces(namespaces_max=4)
    names.open(identity(), SHARD)
    for expected in (1, 2):
        names.bump(bytes(32), expected=expected, weights_revision="", token=b"")
    number = names.delete(bytes(32))
    again = names.open(identity(), SHARD)
    assert again.generation > 3
    assert again.number > number
    with pytest.raises(UnknownNamespace, match="01" * 32):
        names.delete(b"\x01" * 32)


def test_namespaces_survive_their_journal() -> None:
    names = Namespaces(namespaces_max=4)
    names.open(identity(1), SHARD)
    names.bump(b"\x01" * 32, expected=1, weights_revision="r9", token=b"t" * 16)
    names.open(identity(2), SHARD)
    names.delete(b"\x02" * 32)
    copy = Namespaces(namespaces_max=4)
    copy.load_state(names.to_state())
    assert copy.to_state() == names.to_state()
    assert copy.bump(b"\x01" * 32, expected=1, weights_revision="r9", token=b"t" * 16)[1] is None
    fresh = copy.open(identity(3), SHARD)
    assert fresh.number > max(f.number for f in names.families())


def test_the_number_of_namespaces_is_bounded() -> None:
    names = Namespaces(namespaces_max=2)
    for n in range(2):
        names.open(identity(n), SHARD)
    with pytest.raises(LimitExceeded, match="the limit is 2"):
        names.open(identity(2), SHARD)
