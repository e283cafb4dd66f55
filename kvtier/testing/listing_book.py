"""A listing kept in a dict: what the shared-memory directory must say, and a check that the store
tells it everything.

Belongs to the store that it was given to; `check` takes the store's lock.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvtier.core.listing import Listed, ListedMany
from kvtier.core.page import KEY_BYTES, NO_SUM
from kvtier.core.page_columns import cut
from kvtier.core.store import Store

__all__ = ["ListingBook"]


class ListingBook:
    def __init__(self) -> None:
        self.pages: dict[tuple[int, int, bytes], Listed] = {}
        self.namespaces: dict[int, int] = {}  # number -> shard count

    def put(self, page: Listed) -> None:
        self.pages[page.namespace, page.shard, page.key] = page

    def put_many(self, pages: ListedMany) -> None:
        for page in _pages_of(pages):
            self.put(page)

    def fill(self, pages: ListedMany) -> None:
        for page in _pages_of(pages):
            assert (page.namespace, page.shard, page.key) not in self.pages, "listed already"
            self.put(page)

    def remove(self, namespace: int, shard: int, key: bytes) -> None:
        del self.pages[namespace, shard, key]

    def remove_many(
        self,
        namespace: NDArray[np.uint32],
        shard: NDArray[np.uint16],
        key_words: NDArray[np.uint64],
    ) -> None:
        keys = cut(key_words.tobytes(), KEY_BYTES)
        for name in zip(namespace.tolist(), shard.tolist(), keys, strict=True):
            del self.pages[name]

    def open_namespace(self, namespace: int, shard_count: int, generation: int) -> None:
        self.namespaces[namespace] = shard_count

    def end_namespace(self, namespace: int) -> None:
        del self.namespaces[namespace]

    def check(self, store: Store) -> None:
        """Listed <=> findable, each page with its best copy. AssertionError names the page."""
        table = store._table
        best: dict[tuple[int, int, bytes], int] = {}
        for tier in sorted(store.status(), reverse=True):
            for row in store.survey.sealed_rows(tier).tolist():
                best[table.namespace[row], table.shard[row], table.key(row)] = row
        assert self.pages.keys() == best.keys(), "listed and findable pages differ"
        for name, row in best.items():
            page = self.pages[name]
            copy = (table.tier[row], table.slot[row], table.length[row], table.generation[row])
            assert (page.tier, page.slot, page.length, page.generation) == copy, page
            assert (page.codec, page.lossy) == (table.codec[row], bool(table.lossy[row])), page
        assert self.namespaces == store._shard_counts


def _pages_of(pages: ListedMany) -> Iterator[Listed]:
    has_sums = pages.payload_sum is not None and pages.origin_sum is not None
    for i, key in enumerate(cut(pages.key_words.tobytes(), KEY_BYTES)):
        sums = NO_SUM, NO_SUM
        if pages.payload_sum is not None and pages.origin_sum is not None:
            sums = pages.payload_sum[i].tobytes(), pages.origin_sum[i].tobytes()
        yield Listed(
            int(pages.namespace[i]),
            int(pages.shard[i]),
            key,
            pages.tier,
            int(pages.codec[i]),
            bool(pages.lossy[i]),
            int(pages.slot[i]),
            int(pages.length[i]),
            int(pages.generation[i]),
            has_sums,
            *sums,
        )
