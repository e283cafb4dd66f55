"""A list of the findable pages that is kept outside of the store, in step with it: for each page
its best copy. The shared-memory directory is one.

Called under the store's lock, so it must be quick, take no lock that is held while the store is
called, and not call the store.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.core.page import NO_SUM

__all__ = ["Listed", "ListedMany", "Listing"]


class Listed(NamedTuple):
    """The best copy of a page. `has_sums` False: the store has not been told the sums of this copy,
    which became the best one because a better one has gone."""

    namespace: int
    shard: int
    key: bytes
    tier: int
    codec: int
    lossy: bool
    slot: int
    length: int
    generation: int
    has_sums: bool = False
    payload_sum: bytes = NO_SUM
    origin_sum: bytes = NO_SUM


class ListedMany(NamedTuple):
    """Pages of one tier, as columns of one length; without sums if `payload_sum` is None."""

    tier: int
    namespace: npt.NDArray[np.uint32]
    shard: npt.NDArray[np.uint16]
    key_words: npt.NDArray[np.uint64]  # (n, 4), the keys as little-endian words
    codec: npt.NDArray[np.uint8]
    lossy: npt.NDArray[np.uint8]
    slot: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    generation: npt.NDArray[np.uint64]
    payload_sum: npt.NDArray[np.uint8] | None = None  # (n, 16)
    origin_sum: npt.NDArray[np.uint8] | None = None


class Listing(Protocol):
    """What the store tells it."""

    def put(self, page: Listed) -> None:
        """The best copy of a page, in place of what was listed for it."""

    def put_many(self, pages: ListedMany) -> None:
        """As `put` of each."""

    def fill(self, pages: ListedMany) -> None:
        """As `put` of each, for very many pages that are not listed."""

    def remove(self, namespace: int, shard: int, key: bytes) -> None:
        """No copy can be found any more."""

    def remove_many(
        self,
        namespace: npt.NDArray[np.uint32],
        shard: npt.NDArray[np.uint16],
        key_words: npt.NDArray[np.uint64],
    ) -> None:
        """As `remove` of each; columns as those of ListedMany."""

    def open_namespace(self, namespace: int, shard_count: int, generation: int) -> None:
        """Pages of this number can be found from now on."""

    def end_namespace(self, namespace: int) -> None:
        """They cannot any more, listed or not."""
