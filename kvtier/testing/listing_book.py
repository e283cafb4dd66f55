"""A listing kept in a dict: what the shared-memory directory must say, and a check that the store
tells it everything.

Belongs to the store that it was given to; `check` takes the store's lock.
"""

from __future__ import annotations

from kvtier.core.listing import Listed, ListedMany
from kvtier.core.page import KEY_BYTES
from kvtier.core.store import Store

__all__ = ["ListingBook"]


class ListingBook:
    def __init__(self) -> None:
        self.pages: dict[tuple[int, int, bytes], Listed] = {}
        self.namespaces: dict[int, int] = {}  # number -> shard count

    def put(self, page: Listed) -> None:
        self.pages[page.namespace, page.shard, page.key] = page

    def put_many(self, pages: ListedMany) -> None:
        keys = pages.key_words.tobytes()
        for i in range(len(pages.slot)):
            listed = Listed(
                int(pages.namespace[i]),
                int(pages.shard[i]),
                keys[i * KEY_BYTES : (i + 1) * KEY_BYTES],
                pages.tier,
                int(pages.codec[i]),
                bool(pages.lossy[i]),
                int(pages.slot[i]),
                int(pages.length[i]),
                int(pages.generation[i]),
            )
            assert (listed.namespace, listed.shard, listed.key) not in self.pages, "listed already"
            self.put(listed)

    def remove(self, namespace: int, shard: int, key: bytes) -> None:
        del self.pages[namespace, shard, key]

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
