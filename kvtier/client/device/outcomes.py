"""What an offload or a load came to, page by page, and the handle of one that is under way.

Results are immutable. A handle may be asked from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvtier.core.page import GetCode, PutCode, Tier
from kvtier.errors import DeadlineExceeded

__all__ = ["LoadResult", "OffloadResult", "Transfer"]

R = TypeVar("R")

_LATE: Final = "wait again; its pages stay as they are until it is done"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """One entry a page: `reasons`, the tier it came from (None for no hit), and whether a codec has
    rounded its numbers. Only the bytes of a HIT are there.
    """

    reasons: tuple[GetCode, ...]
    tiers: tuple[Tier | None, ...]
    lossy: tuple[bool, ...]

    @classmethod
    def of_all(cls, count: int, reason: GetCode) -> LoadResult:
        """`count` pages that all came to the same, and not to a hit."""
        return cls(reasons=(reason,) * count, tiers=(None,) * count, lossy=(False,) * count)

    def __add__(self, later: LoadResult) -> LoadResult:
        return LoadResult(
            reasons=self.reasons + later.reasons,
            tiers=self.tiers + later.tiers,
            lossy=self.lossy + later.lossy,
        )

    @property
    def prefix(self) -> int:
        """Leading hits, in pages."""
        hits = [reason is GetCode.HIT for reason in self.reasons]
        return hits.index(False) if False in hits else len(hits)

    @property
    def hits(self) -> int:
        """All hits."""
        return self.reasons.count(GetCode.HIT)

    @property
    def failed(self) -> tuple[int, ...]:
        """The positions of pages that are no hits: these are what is to be computed."""
        return tuple(i for i, reason in enumerate(self.reasons) if reason is not GetCode.HIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadResult:
    """One entry a page."""

    reasons: tuple[PutCode, ...]

    @classmethod
    def of_all(cls, count: int, reason: PutCode) -> OffloadResult:
        """`count` pages that all came to the same, and to no place in the cache."""
        return cls(reasons=(reason,) * count)

    def __add__(self, later: OffloadResult) -> OffloadResult:
        return OffloadResult(reasons=self.reasons + later.reasons)

    @property
    def stored(self) -> int:
        """How many of the pages are in the cache now, put there by this call or before."""
        return sum(reason.is_stored for reason in self.reasons)

    @property
    def failed(self) -> tuple[int, ...]:
        """The positions of pages that are not in the cache."""
        return tuple(i for i, reason in enumerate(self.reasons) if not reason.is_stored)


class Transfer(Generic[R]):
    """An offload or a load that goes on in the background.

    Until it is done, its pages are pinned in the pool (those of an offload each until it has been
    read). Once it is done nothing touches them any more.
    """

    def __init__(self, future: Future[R], all_came_to: Callable[[GetCode], R]) -> None:
        """`all_came_to(code)` is the outcome where no page was touched."""
        self._future = future
        self._all_came_to = all_came_to

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def poll(self) -> R | None:
        """The outcome, None while it goes on. Raises as `wait`, but never DeadlineExceeded."""
        return self._outcome() if self._future.done() else None

    def wait(self, deadline: float | None = None) -> R:
        """The outcome. Raises DeadlineExceeded when it is not done in `deadline` seconds: it goes
        on then. Raises what the client raised (ClientClosed, ForkedClient, LayoutError).
        """
        if not self._ends_within(deadline):
            raise DeadlineExceeded(f"not done in {deadline:g} s", remedy=_LATE)
        return self._outcome()

    def cancel(self) -> bool:
        """Drops it if it has not begun: its pages come to UNAVAILABLE. False: it has begun."""
        return self._future.cancel()

    def wait_or_drop(self, deadline: float, overrun: float) -> R:
        """As `wait`, for a caller that does not come back: what has not begun in `deadline` seconds
        is dropped and comes to TIMEOUT; what has begun gets `overrun` seconds more.
        """
        if not self._ends_within(deadline):
            if self._future.cancel():
                return self._all_came_to(GetCode.TIMEOUT)
            return self.wait(overrun)
        return self._outcome()

    def _ends_within(self, timeout_s: float | None) -> bool:
        try:
            self._future.exception(timeout_s)
        except TimeoutError:
            return False
        except CancelledError:
            pass
        return True

    def _outcome(self) -> R:
        try:
            return self._future.result()
        except CancelledError:
            return self._all_came_to(GetCode.UNAVAILABLE)
