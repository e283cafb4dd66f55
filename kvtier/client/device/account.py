"""Who holds which page of a pool: references, pins of copies under way, and the free pages.

Promise: free + held + draining = all pages, after every call. A page is *held* while it has
references; without one, but with a copy under way that reads or writes it, it is *draining*: nobody
gets it before the copy has let go of it. Every call does all that it is asked or nothing.

Safe from any thread; no torch, no device.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.client.device.errors import PageNotHeld, PoolExhausted, PoolInconsistent
from kvtier.errors import LimitExceeded

__all__ = ["Occupancy", "PageAccount"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Pages by what they are, all at one moment. `pinned` are those under copy, held or not."""

    pages: int
    free: int
    held: int
    draining: int
    pinned: int


class PageAccount:
    """The accounts of pages 0 .. `pages` - 1, at first all free.

    `on_free` is told, under the lock, of pages that have just become free.
    """

    def __init__(self, pages: int, on_free: Callable[[Sequence[int]], None]) -> None:
        self._lock = threading.Lock()
        self._on_free = on_free
        self._references = [0] * pages
        self._pins = [0] * pages
        # The last one freed goes out first: its bytes may still be in a cache.
        self._free = list(range(pages - 1, -1, -1))
        self._draining = 0
        self._pinned = 0

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, each with one reference. Raises PoolExhausted, LimitExceeded."""
        if count < 0:
            raise LimitExceeded(f"allocate({count})", remedy="ask for 0 pages or more")
        with self._lock:
            free = len(self._free)
            if count > free:
                raise PoolExhausted(
                    f"{count} pages asked for, {free} of {len(self._references)} are free, "
                    f"{self._draining} wait for copies",
                    remedy="free pages, wait for copies under way, or make a bigger pool",
                )
            given = self._free[free - count :][::-1]
            del self._free[free - count :]
            for page in given:
                self._references[page] = 1
            return given

    def share(self, ids: Sequence[int]) -> None:
        """One reference more on each. Raises PageNotHeld."""
        with self._lock:
            self._check_held(ids, "share")
            for page in ids:
                self._references[page] += 1

    def free(self, ids: Sequence[int]) -> None:
        """One reference less on each; without one left a page is free, or draining while a copy
        uses it. Raises PageNotHeld.
        """
        with self._lock:
            self._check_counts(ids, self._references, "free")
            for page in ids:
                self._references[page] -= 1
            without = [page for page in dict.fromkeys(ids) if not self._references[page]]
            self._draining += len(without)
            self._drain([page for page in without if not self._pins[page]])

    def pin(self, ids: Sequence[int]) -> None:
        """A copy begins to use these pages. Raises PageNotHeld."""
        with self._lock:
            self._check_held(ids, "pin")
            for page in ids:
                self._pinned += not self._pins[page]
                self._pins[page] += 1

    def unpin(self, ids: Sequence[int]) -> None:
        """A copy has let go of these pages. Raises PageNotHeld for one that it had not pinned."""
        with self._lock:
            self._check_counts(ids, self._pins, "unpin")
            for page in ids:
                self._pins[page] -= 1
                self._pinned -= not self._pins[page]
            self._drain(
                [
                    page
                    for page in dict.fromkeys(ids)
                    if not self._pins[page] and not self._references[page]
                ]
            )

    def references(self, page: int) -> int:
        """How many hold this page."""
        with self._lock:
            return self._references[page]

    @property
    def free_pages(self) -> int:
        with self._lock:
            return len(self._free)

    @property
    def occupancy(self) -> Occupancy:
        """What the running counts say; `check` counts anew."""
        with self._lock:
            return self._occupancy()

    def check(self) -> None:
        """Counts everything anew. Raises PoolInconsistent naming the first difference."""
        with self._lock:
            free = set(self._free)
            kept, counted = self._occupancy(), self._counted()
            if kept != counted:
                raise _inconsistent(f"{kept}, and counted anew {counted}")
            for page, (references, pins) in enumerate(
                zip(self._references, self._pins, strict=True)
            ):
                if references < 0 or pins < 0 or ((page in free) != (not references and not pins)):
                    raise _inconsistent(
                        f"page {page}: {references} references, {pins} pins, "
                        f"{'free' if page in free else 'not free'}"
                    )
            if len(free) != len(self._free):
                raise _inconsistent("a page is free twice")

    def _occupancy(self) -> Occupancy:
        pages, free = len(self._references), len(self._free)
        return Occupancy(
            pages=pages,
            free=free,
            held=pages - free - self._draining,
            draining=self._draining,
            pinned=self._pinned,
        )

    def _counted(self) -> Occupancy:
        draining = [
            pins and not references
            for references, pins in zip(self._references, self._pins, strict=True)
        ]
        return Occupancy(
            pages=len(self._references),
            free=len(self._free),
            held=sum(map(bool, self._references)),
            draining=sum(map(bool, draining)),
            pinned=sum(map(bool, self._pins)),
        )

    def _drain(self, pages: list[int]) -> None:
        """Pages without references and pins become free."""
        self._draining -= len(pages)
        self._free += pages
        if pages:
            self._on_free(pages)

    def _check_held(self, ids: Sequence[int], verb: str) -> None:
        for page in ids:
            if not self._is_known(page) or not self._references[page]:
                raise self._not_held(page, verb)

    def _check_counts(self, ids: Sequence[int], have: list[int], verb: str) -> None:
        for page, count in Counter(ids).items():
            if not self._is_known(page) or have[page] < count:
                raise self._not_held(page, verb)

    def _is_known(self, page: int) -> bool:
        return 0 <= page < len(self._references)

    def _not_held(self, page: int, verb: str) -> PageNotHeld:
        what = "is not held so often" if self._is_known(page) else "is not of this pool"
        return PageNotHeld(
            f"{verb}: page {page} {what} (a pool of {len(self._references)} pages)",
            remedy="free each reference once, and use only ids that `allocate` gave",
        )


def _inconsistent(what: str) -> PoolInconsistent:
    return PoolInconsistent(what, remedy="report this: a defect of the pool")
