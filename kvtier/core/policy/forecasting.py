"""Policies that hear of requests, by name. They need numba (extra `fast`), which is not loaded
before one of them is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvtier.core.policy.base import Policy
from kvtier.core.policy.lru import Clock
from kvtier.core.table import CopyTable

__all__ = ["FORECASTING", "REFUSING", "Forecasting"]

Words = npt.NDArray[np.uint64]


@runtime_checkable
class Forecasting(Policy, Protocol):
    """What it is told beside the calls of Policy, and what it can be asked."""

    def request(
        self, now: float, words: Words, *, whole: int | None = None, output: int | None = None
    ) -> None:
        """A request whose blocks, from the first, are known by `words` comes `now` (seconds, of
        any clock that does not go back); its pages are touched and admitted after this.

        `whole`: how many of the blocks are whole pages. `output`: tokens that it is to bring forth.
        """

    def hint(self, namespace: int, key: bytes, returns_after_s: float) -> bool:
        """Somebody says when the conversation comes back that this page was the last one of;
        negative: it has ended. False: nobody has used that page lately."""

    def hint_word(self, word: np.uint64, returns_after_s: float) -> bool:
        """As `hint`, of the page that is known by this word."""

    def learned(self) -> bytes:
        """What outlives the process."""

    def learn_from(self, learned: bytes) -> None:
        """Takes up what `learned` gave. Raises ValueError for what it cannot have given."""

    def takes(self, words: Words) -> int:
        """How many of these pages, which are to be admitted, are worth it: leading ones."""


def _gittins(table: CopyTable, clock: Clock, *, has_bypass: bool) -> Forecasting:
    """Raises ImportError without numba."""
    module = import_module("kvtier.core.policy.gittins.policy")
    made: Forecasting = module.Gittins(table, clock, has_bypass=has_bypass)
    return made


#: Each makes the queue of one size class of one tier.
FORECASTING: dict[str, Callable[[CopyTable, Clock], Forecasting]] = {
    "gittins": partial(_gittins, has_bypass=False),
    "gittins-bypass": partial(_gittins, has_bypass=True),
}
#: Of these, those that may refuse pages, as a cache that need not take every put: no daemon's.
REFUSING: frozenset[str] = frozenset({"gittins-bypass"})
