"""What an eviction policy is: it names the next page to give up and never touches the page itself.

The same objects run in the daemon and in the simulator. The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Policy"]


class Policy(Protocol):
    """One queue of pages of one size class in one tier. Rows are rows of core/table.py.

    A policy writes two columns: `stamp`, by the store's clock, at every admission and use; and
    `queued`, not 0 as long as the page needs no `ready` to be named.
    """

    def admit(self, row: int) -> None:
        """The page can be evicted from now on."""

    def admit_many(self, rows: npt.NDArray[np.int64]) -> None:
        """As `admit` of each, in order."""

    def touch(self, rows: npt.NDArray[np.int64]) -> None:
        """The pages were used together; `rows` goes from the head of their chain to its tail.

        A page named twice is used once.
        """

    def lead(self, row: int) -> None:
        """A page is about to come after this one: it must not be what gives way for that."""

    def keep(self, row: int) -> None:
        """A page after it has come: it is not named before `ready`."""

    def ready(self, row: int) -> None:
        """Its last lease, the last page after it, or what else kept it, is gone."""

    def forget(self, row: int) -> None:
        """The page is gone: deleted, or evicted with a sibling shard that `evict` has just named.

        Nothing happens when it is not here.
        """

    def evict(self, evictable: Callable[[int], bool]) -> int:
        """Names the row to evict next, which leaves the queue, or NO_ROW. Never a page with a
        lease or a resident child.

        A page that `evictable` refuses is not named again before `ready`.
        """

    def coldest(self) -> int:
        """The stamp of a page that is about the next to be evicted; a very high number when there
        is none."""
