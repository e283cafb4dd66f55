"""The directory says what the store knows: the store machine with a directory as its listing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.core.listing import Listed, ListedMany
from kvtier.core.page import NO_SUM, Codec, Tier
from kvtier.core.store import Store
from kvtier.daemon.local_listing import DirectoryListing
from kvtier.testing.listing_book import ListingBook
from kvtier.testing.store_machine import StoreMachine
from kvtier.transfer.local.directory import Directory
from kvtier.transfer.local.entry import entry_fits
from kvtier.transfer.local.lookup import DirectoryView
from kvtier.transfer.local.vectors import NumpyKernels
from tests.core import support

BOOT = 99
SHORT = settings(max_examples=15, stateful_step_count=30, deadline=None, print_blob=True)


class Mirrored(ListingBook):
    """A book, and a directory that is told the same."""

    def __init__(self) -> None:
        super().__init__()
        self.is_batch = False
        self.directory = Directory(
            pages_max=64, namespaces_max=64, boot_id=BOOT, hash_seed=3, kernels=NumpyKernels()
        )
        self.listing = DirectoryListing(self.directory)
        self.view = DirectoryView(self.directory.fd, boot_id=BOOT)

    def put(self, page: Listed) -> None:
        super().put(page)
        if not self.is_batch:
            self.listing.put(page)

    def put_many(self, pages: ListedMany) -> None:
        self.is_batch = True
        super().put_many(pages)
        self.is_batch = False
        self.listing.put_many(pages)

    def remove(self, namespace: int, shard: int, key: bytes) -> None:
        super().remove(namespace, shard, key)
        self.listing.remove(namespace, shard, key)

    def remove_many(self, namespace: np.ndarray, shard: np.ndarray, key_words: np.ndarray) -> None:
        super().remove_many(namespace, shard, key_words)
        self.listing.remove_many(namespace, shard, key_words)

    def open_namespace(self, namespace: int, shard_count: int, generation: int) -> None:
        super().open_namespace(namespace, shard_count, generation)
        self.listing.open_namespace(namespace, shard_count, generation)

    def end_namespace(self, namespace: int) -> None:
        super().end_namespace(namespace)
        self.listing.end_namespace(namespace)

    def check(self, store: Store) -> None:
        super().check(store)
        assert self.directory.pages == len(self.pages)
        for page in self.pages.values():
            found = self.view.lookup([page.key], namespace=page.namespace, shard=page.shard)
            assert found.hits.all(), page
            check_entry(found.entries[0], page)
        for number in range(1, 10):
            assert self.view.namespace_is_current(number, 1) == (number in self.namespaces)

    def close(self) -> None:
        self.view.close()
        self.directory.close()


def check_entry(entry: np.ndarray, page: Listed) -> None:
    """Field by field, as the diagram in transfer/local/entry.py says."""
    raw = entry.tobytes()
    assert raw[:32] == page.key
    assert int.from_bytes(raw[32:36], "little") == page.namespace
    assert int.from_bytes(raw[36:38], "little") == page.shard
    assert raw[38] == page.tier
    assert raw[39] == (0x11 if page.has_sums else 0x01)
    assert int.from_bytes(raw[40:48], "little") == page.generation
    assert int.from_bytes(raw[48:56], "little") == page.slot
    assert int.from_bytes(raw[56:62], "little") == page.length
    assert (raw[62], raw[63]) == (page.codec, page.lossy)
    assert raw[64:80] == (page.payload_sum if page.has_sums else NO_SUM)
    assert raw[80:96] == (page.origin_sum if page.has_sums else NO_SUM)


@pytest.mark.parametrize("slots", [2, 4, 16])
def test_the_directory_says_what_the_store_knows(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Mirrored] = []

    def mirrored() -> Mirrored:
        made.append(Mirrored())
        return made[-1]

    monkeypatch.setattr(support, "ListingBook", mirrored)

    class Machine(StoreMachine):
        make_store = staticmethod(lambda: support.make_store(slots=slots))

        def teardown(self) -> None:
            made.pop().close()

    run_state_machine_as_test(Machine, settings=SHORT)


def test_many_at_once_are_as_one_by_one() -> None:
    """What a restart puts back, and what becomes the best copy when a better one goes."""
    rng = np.random.default_rng(5)
    count = 200
    pages = ListedMany(
        tier=Tier.NVME,
        namespace=rng.integers(1, 4, count).astype(np.uint32),
        shard=rng.integers(0, 3, count).astype(np.uint16),
        key_words=rng.integers(0, 2**63, (count, 4)).astype(np.uint64),
        codec=rng.choice([int(codec) for codec in Codec], count).astype(np.uint8),
        lossy=rng.integers(0, 2, count).astype(np.uint8),
        slot=rng.integers(0, 2**40, count).astype(np.uint64),
        length=rng.integers(1, 2**40, count).astype(np.uint64),
        generation=rng.integers(1, 2**60, count).astype(np.uint64),
    )
    with Directory(pages_max=count, namespaces_max=8, boot_id=BOOT, hash_seed=3) as directory:
        listing = DirectoryListing(directory)
        book = ListingBook()
        listing.fill(pages)
        book.fill(pages)
        assert directory.pages == count
        with DirectoryView(directory.fd, boot_id=BOOT) as view:
            rows = []
            for page in book.pages.values():
                found = view.lookup([page.key], namespace=page.namespace, shard=page.shard)
                check_entry(found.entries[0], page)
                rows.append(found.entries[0].copy())
            assert not entry_fits(np.array(rows), 1 << 50).any(), "only the daemon can read these"
            for page, row in zip(book.pages.values(), rows, strict=True):
                listing.put(page)
                again = view.lookup([page.key], namespace=page.namespace, shard=page.shard)
                assert np.array_equal(again.entries[0], row)
            sums = rng.integers(0, 256, (2, count, 16)).astype(np.uint8)
            known = pages._replace(payload_sum=sums[0], origin_sum=sums[1])
            listing.put_many(known)
            book.put_many(known)
            assert directory.pages == count
            for page in book.pages.values():
                found = view.lookup([page.key], namespace=page.namespace, shard=page.shard)
                check_entry(found.entries[0], page)
            gone = np.arange(0, count, 3)
            listing.remove_many(pages.namespace[gone], pages.shard[gone], pages.key_words[gone])
            book.remove_many(pages.namespace[gone], pages.shard[gone], pages.key_words[gone])
            assert directory.pages == len(book.pages) == count - len(gone)


def test_a_page_without_a_place_is_counted_and_no_error() -> None:
    with Directory(pages_max=8, namespaces_max=8, boot_id=BOOT, hash_seed=3) as directory:
        listing = DirectoryListing(directory)
        for number in range(100):
            key = number.to_bytes(32, "little")
            listing.put(Listed(1, 0, key, Tier.HOST, Codec.RAW, False, 0, 10, number + 1))
        assert directory.pages + directory.refused == 100
        assert directory.refused > 0
        listing.remove(1, 0, (99).to_bytes(32, "little"))


def test_a_namespace_without_a_word_is_not_current(caplog: pytest.LogCaptureFixture) -> None:
    with Directory(pages_max=8, namespaces_max=1, boot_id=BOOT, hash_seed=3) as directory:
        listing = DirectoryListing(directory)
        for number in range(1, 2000):
            listing.open_namespace(number, 1, 1)
        with DirectoryView(directory.fd, boot_id=BOOT) as view:
            current = [view.namespace_is_current(number, 1) for number in range(1, 2000)]
        assert 0 < sum(current) < 1999
        assert "local.namespace_unlisted" in {record.msg for record in caplog.records}
