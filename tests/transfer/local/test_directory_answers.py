"""A whole lookup in one call, and what of a lookup can be read: both implementations, beside the
steps that they stand for."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest

from kvtier.core.page import Codec, Tier
from kvtier.errors import ClientClosed, ForkedClient, KeyLengthError
from kvtier.packing.checksum import KEY_WORD
from kvtier.transfer.local.entry import BUSY, entry_fits
from kvtier.transfer.local.header import OPEN_WORD, SHIFTS_WORD
from kvtier.transfer.local.lookup import DirectoryView
from kvtier.transfer.local.protocol import ANSWER_KEYS_MAX, DOUBT, HIT, MISS, Found
from tests.signals import interrupted
from tests.transfer.local.directory_parts import (
    BOOT_ID,
    KERNELS,
    NAMESPACE,
    SHARD,
    content,
    directory,
    forged,
    kernels_named,
    keys_of,
    rows_of,
)

WHERE = {"namespace": NAMESPACE, "shard": SHARD}
ARENA = 1 << 30
LENGTH = 4096 * 3 + 17


def attached(fd, kernels):
    return DirectoryView(fd, boot_id=BOOT_ID, kernels=kernels_named(kernels))


def as_bytes(keys):
    return [key.tobytes() for key in keys]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 33, ANSWER_KEYS_MAX])
def test_an_answer_is_a_lookup(kernels, count):
    keys = keys_of(count, 2 * ANSWER_KEYS_MAX)
    with directory(1000) as made, attached(made.fd, kernels) as seen:
        made.set_namespace(NAMESPACE, 4)
        made.put_many(rows_of(keys[::2], 5))
        some = as_bytes(keys[:count])
        codes, tiers = seen.answer(some, **WHERE, generation=4)
        found = seen.lookup(some, **WHERE)
        assert codes == found.codes.tobytes()
        assert tiers == found.tiers.tobytes()
        assert codes.count(HIT) == (count + 1) // 2
        assert set(tiers) <= {Tier.HOST, 0}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("count", [1, 33, ANSWER_KEYS_MAX])
def test_copies_that_were_rounded_are_misses_to_an_exact_lookup(kernels, count):
    """Of every third page, both in a whole lookup and in a search; every fifth is not there."""
    keys = keys_of(1, count)
    rows = rows_of(keys, 1)
    rows[::3, 7] |= np.uint64(1 << 56)
    is_there = np.arange(count) % 5 != 4
    exact = [HIT if there and place % 3 else MISS for place, there in enumerate(is_there)]
    with directory(1000) as made, attached(made.fd, kernels) as seen:
        made.set_namespace(NAMESPACE, 1)
        made.put_many(rows[is_there])
        some = as_bytes(keys)
        for with_entries in (True, False):
            found = seen.lookup(some, **WHERE, with_entries=with_entries, is_exact=True)
            assert found.codes.tolist() == exact
        codes, _ = seen.answer(some, **WHERE, generation=1, is_exact=True)
        assert list(codes) == exact
        codes, _ = seen.answer(some, **WHERE, generation=1)
        assert [code == HIT for code in codes] == is_there.tolist()


@pytest.mark.parametrize("kernels", KERNELS)
def test_there_is_no_answer_for_a_namespace_that_is_not_current(kernels):
    keys = as_bytes(keys_of(1, 3))
    with directory() as made, attached(made.fd, kernels) as seen:
        assert seen.answer(keys, **WHERE, generation=1) is None
        made.set_namespace(NAMESPACE, 1)
        made.put_many(rows_of(keys_of(1, 3), 1))
        assert seen.answer(keys, **WHERE, generation=1) == (bytes([HIT] * 3), bytes([2] * 3))
        assert seen.answer(keys, **WHERE, generation=2) is None
        other = {"namespace": NAMESPACE, "shard": SHARD + 1}
        assert seen.answer(keys, **other, generation=1) == (bytes(3), bytes(3))
        made.set_namespace(NAMESPACE, 2)
        assert seen.answer(keys, **WHERE, generation=1) is None
        high = 2**32 - 1
        made.set_namespace(high, 2**32 - 1)
        assert seen.answer(keys, namespace=high, shard=0, generation=2**32 - 1)[0] == bytes(3)


@pytest.mark.parametrize("kernels", KERNELS)
def test_no_namespace_has_such_numbers(kernels):
    """What is not a number of 32 bits must not become another namespace's."""
    with directory() as made, attached(made.fd, kernels) as seen:
        made.set_namespace(5, 9)
        for number, generation in ((0, 0), (4, 1 << 32 | 9), (5, 0), (0, 9), (5, 1 << 64), (5, -1)):
            found = seen.answer([bytes(32)], namespace=number, shard=0, generation=generation)
            assert found is None
            assert not seen.namespace_is_current(number, generation)
        assert seen.answer([bytes(32)], namespace=5, shard=0, generation=9) is not None


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_answer_in_the_middle_of_another_one(kernels):
    """A finalizer that runs anywhere in a call, and a handler of a signal, look something up."""
    present, absent = as_bytes(keys_of(1, 50)), as_bytes(keys_of(2, 50))
    inner, threshold = [], gc.get_threshold()

    class Asks:
        """Garbage that leaves more garbage, so that every allocation of a call collects some."""

        goes_on = True

        def __init__(self):
            self.itself = self

        def __del__(self):
            inner.append(seen.answer(present, **WHERE, generation=1)[0])
            if Asks.goes_on:
                Asks()

    with directory() as made, attached(made.fd, kernels) as seen:
        made.set_namespace(NAMESPACE, 1)
        made.put_many(rows_of(keys_of(1, 50), 1))
        gc.set_threshold(1)
        try:
            outer = set()
            Asks()
            for _ in range(300):
                outer.add(seen.answer(absent, **WHERE, generation=1)[0])
        finally:
            Asks.goes_on = False
            gc.set_threshold(*threshold)
        gc.collect()

        def look_up():
            inner.append(seen.answer(present, **WHERE, generation=1)[0])

        with interrupted(look_up, pause_s=0.0005) as runs:
            until = time.monotonic() + 0.5
            while runs() <= 10 or time.monotonic() < until:
                outer.add(seen.answer(absent, **WHERE, generation=1)[0])
    assert outer == {bytes([MISS] * 50)}
    assert len(inner) > 300
    assert set(inner) == {bytes([HIT] * 50)}


@pytest.mark.parametrize("kernels", KERNELS)
def test_there_is_no_answer_in_doubt_and_it_is_counted(kernels):
    keys = keys_of(1, 2)
    with directory() as made:
        made.set_namespace(NAMESPACE, 1)
        made.put_many(rows_of(keys, 1))
        data = content(made)
    at = data.index(keys[0].tobytes(), 8192)
    with forged(data) as (fd, pages), attached(fd, kernels) as seen:
        assert seen.answer(as_bytes(keys), **WHERE, generation=1)[0] == bytes([HIT, HIT])
        whole = pages[at + 120 : at + 128]
        pages[at + 120 : at + 128] = BUSY.to_bytes(8, "little")
        assert seen.answer(as_bytes(keys), **WHERE, generation=1) is None
        assert seen.doubts == 1
        assert seen.torn_reads > 0
        pages[at + 120 : at + 128] = whole
        assert seen.answer(as_bytes(keys), **WHERE, generation=1) is not None
        pages[SHIFTS_WORD * 8] = 1  # entries are being moved: only what was found counts
        assert seen.answer(as_bytes(keys), **WHERE, generation=1) is not None
        assert seen.answer(as_bytes(keys_of(2, 2)), **WHERE, generation=1) is None
        assert seen.doubts == 3
        pages[OPEN_WORD * 8] = 0
        assert seen.answer(as_bytes(keys), **WHERE, generation=1) is None


@pytest.mark.parametrize("kernels", KERNELS)
def test_answers_while_the_table_is_made_anew(kernels):
    """It grows ten times; what was in it before is found all the time."""
    first = keys_of(1, 8)
    many = keys_of(2, 100_000)
    with directory(200_000, kernels="numpy") as made, attached(made.fd, kernels) as seen:
        made.set_namespace(NAMESPACE, 1)
        made.put_many(rows_of(first, 1))
        before = seen._live().header.entries
        ended = threading.Event()
        answers, undecided = [], 0

        def look():
            nonlocal undecided
            while not ended.is_set():
                found = seen.answer(as_bytes(first), **WHERE, generation=1)
                if found is None:
                    undecided += 1
                else:
                    answers.append(found[0])

        reader = threading.Thread(target=look)
        reader.start()
        for at in range(0, len(many), 2000):
            made.put_many(rows_of(many[at : at + 2000], 1))
        ended.set()
        reader.join(10)
        assert seen._live().header.entries > 8 * before
        assert set(answers) == {bytes([HIT] * 8)}
        assert undecided < len(answers)


@pytest.mark.parametrize("kernels", KERNELS)
def test_keys_of_another_length_are_refused(kernels):
    with directory() as made, attached(made.fd, kernels) as seen:
        with pytest.raises(KeyLengthError):
            seen.answer([bytes(31)], **WHERE, generation=1)
        seen.close()
        with pytest.raises(ClientClosed):
            seen.answer([bytes(32)], **WHERE, generation=1)


def test_a_child_process_gets_an_error():
    with directory() as made, attached(made.fd, "numpy") as seen:
        child = os.fork()
        if child == 0:
            try:
                seen.answer([bytes(32)], **WHERE, generation=1)
            except ForkedClient:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def any_entries(draw, count):
    """Found entries as a hostile directory may have them: each field right, near a border, or
    anything."""
    found = Found.room_for(count)
    found.words[:] = draw.integers(0, 2**64, len(found.words), np.uint64)
    rows = found.entries
    found.codes[:] = draw.choice([HIT, HIT, HIT, MISS, DOUBT], count)
    right = draw.random(count) < 0.8
    rows[right, 4] = np.uint64(Tier.HOST << 48 | 0x11 << 56 | NAMESPACE)
    slots = ARENA // 4096
    borders = [0, 1, slots - 6, slots - 5, slots - 4, slots - 1, slots, 2**52, 2**63, 2**64 - 1]
    rows[:, 6] = draw.choice(np.array(borders, np.uint64), count)
    lengths = draw.choice(
        np.array([LENGTH, LENGTH, LENGTH, 0, LENGTH + 1, 2**31, 2**48 - 1], np.uint64), count
    )
    codecs = draw.choice(np.array([Codec.RAW, Codec.RAW, Codec.FP8, 0, 255], np.uint64), count)
    lossy = draw.choice(np.array([0, 0, 1, 2, 255], np.uint64), count)
    rows[:, 7] = lengths | codecs << np.uint64(48) | lossy << np.uint64(56)
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("lossy_ok", [False, True])
@pytest.mark.parametrize("arena_bytes", [ARENA, 0, 4096, 4096 + LENGTH])
@pytest.mark.parametrize("seed", range(3))
def test_what_can_be_read_of_any_entries(kernels, lossy_ok, arena_bytes, seed):
    draw = np.random.default_rng(seed)
    found = any_entries(draw, 4000)
    block = draw.integers(0, 2**64, 16, np.uint64)
    with directory() as made, attached(made.fd, kernels) as seen:
        made = seen.readable(
            found, block, arena_bytes=arena_bytes, length=LENGTH, lossy_ok=lossy_ok
        )
    fits = found.hits & entry_fits(found.entries, arena_bytes) & (found.lengths == LENGTH)
    fits &= (found.codecs == Codec.RAW) & ((found.lossy == 0) | lossy_ok)
    assert fits.any() == (arena_bytes == ARENA), f"seed {seed}"
    rows = np.flatnonzero(fits)
    assert np.array_equal(made.rows, rows)
    assert np.array_equal(made.offsets, (found.slots[rows].astype(np.int64) + 1) * 4096)
    assert np.array_equal(made.sums, found.sums[rows])
    expected = np.tile(block, (len(rows), 1))
    expected[:, KEY_WORD : KEY_WORD + 4] = found.entries[rows, :4]
    assert np.array_equal(made.blocks, expected)
    assert np.array_equal(made.outcomes == HIT, fits)
    assert np.array_equal(made.outcomes == MISS, found.codes == MISS)
    assert set(made.outcomes.tolist()) <= {HIT, MISS, DOUBT}
