"""A directory that is made anew, twice as long, under its readers: nothing is lost, and nobody is
told that a page is not there which is."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvtier.transfer.local.header import IN_USE_WORD
from kvtier.transfer.local.lookup import DirectoryView
from kvtier.transfer.local.protocol import DOUBT, HIT, MISS
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


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("step", [1, 7, 3000])
def test_every_page_is_found_at_every_size(kernels: str, step: int) -> None:
    count = 3 * step if step == 3000 else 300
    keys = keys_of(step, count)
    with directory(pages_max=count, kernels=kernels) as made:
        made._table = made._made_anew(made._live(), 16)  # as small as it can be
        with DirectoryView(made.fd, boot_id=BOOT_ID, kernels=kernels_named(kernels)) as view:
            sizes = set()
            for at in range(0, count, step):
                assert made.put_many(rows_of(keys[at : at + step], 5)).all()
                sizes.add(made.entries)
                assert 2 * made.pages <= made.entries
                found = view.lookup(keys, namespace=NAMESPACE, shard=SHARD)
                there = np.arange(count) < at + step
                assert np.array_equal(found.codes, np.where(there, HIT, MISS))
                assert view.recheck(found)[there].all()
                assert np.array_equal(found.entries[there][:, 5], np.full(there.sum(), 5))
            assert len(sizes) >= 2
            removed = made.remove_many(rows_of(keys[::2], 5))
            assert removed.all()
            found = view.lookup(keys, namespace=NAMESPACE, shard=SHARD)
            assert np.array_equal(found.codes == HIT, np.arange(count) % 2 == 1)


@pytest.mark.parametrize("count", [1, 100, 5000])
def test_a_fill_is_as_one_by_one(count: int) -> None:
    keys = keys_of(count, count)
    with directory(pages_max=count) as one, directory(pages_max=count) as other:
        assert one.put_many(rows_of(keys, 3)).all()
        assert other.fill(rows_of(keys, 3)).all()
        assert one.pages == other.pages == count
        assert one.entries == other.entries
        for made in (one, other):
            with DirectoryView(made.fd, boot_id=BOOT_ID) as view:
                found = view.lookup(keys, namespace=NAMESPACE, shard=SHARD)
                assert (found.codes == HIT).all()
                assert np.array_equal(found.entries[:, :15], rows_of(keys, 3)[:, :15])


def test_a_fill_beyond_the_limit_is_refused_and_counted() -> None:
    with directory(pages_max=8) as made:
        placed = made.fill(rows_of(keys_of(1, 20), 1))
        assert placed.sum() == made.pages == 8
        assert made.refused == 12


@pytest.mark.parametrize("kernels", KERNELS)
def test_readers_miss_nothing_while_it_grows(kernels: str) -> None:
    """DOUBT they may say: then they ask the daemon."""
    steady, more = keys_of(1, 200), keys_of(2, 40_000)
    with directory(pages_max=50_000, kernels=kernels) as made:
        made.put_many(rows_of(steady, 1))
        is_over = threading.Event()
        codes = np.zeros(3, np.int64)
        started = threading.Event()

        def read() -> None:
            with DirectoryView(made.fd, boot_id=BOOT_ID, kernels=kernels_named(kernels)) as view:
                while not is_over.is_set():
                    found = view.lookup(steady, namespace=NAMESPACE, shard=SHARD)
                    codes[:] += np.bincount(found.codes, minlength=3)
                    started.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(20)
        try:
            for at in range(0, len(more), 1000):
                assert made.fill(rows_of(more[at : at + 1000], 1)).all()
        finally:
            is_over.set()
            reader.join()
        assert made.entries > 16 * 4096 // 2
        assert codes[MISS] == 0, dict(enumerate(codes.tolist()))
        assert codes[HIT] > 0
        assert codes[DOUBT] >= 0


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("word", [0, 1, 3, 8, 24, 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_number_in_use_that_makes_no_sense_misses_and_harms_nobody(
    kernels: str, word: int
) -> None:
    with directory(pages_max=5000) as made:
        keys = keys_of(1, 100)
        made.put_many(rows_of(keys, 1))
        data = bytearray(content(made))
    data[8 * IN_USE_WORD : 8 * IN_USE_WORD + 8] = word.to_bytes(8, "little")
    with (
        forged(bytes(data)) as (fd, _),
        DirectoryView(fd, boot_id=BOOT_ID, kernels=kernels_named(kernels)) as view,
    ):
        found = view.lookup(keys, namespace=NAMESPACE, shard=SHARD)
        assert not (found.codes == HIT).all()
        assert not view.recheck(found)[found.codes != HIT].any()
