"""Which weights this process serves, from its start through every online update.

Promise: a page is stored and found under the name of the weights that made it. From the moment an
update begins the caches are paused; they go on, under another name, when the update has ended and
SGLang has dropped the KV that was made before. An update that was not given a version, was given
the present one, or did not succeed on all ranks, has a name that no other weights ever get. One
that surely changed nothing leaves everything as it was.

Whoever gives two different sets of weights one version has said that they are the same.

Belongs to the scheduler's thread, in which SGLang updates weights, flushes and attaches. Nothing of
SGLang is loaded.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from kvtier_sglang.border import kept_inside

__all__ = ["WEIGHTS", "LoadedWeights", "Outcome", "WeightedCache"]

log = logging.getLogger(__name__)


class WeightedCache(Protocol):
    """A cache whose pages are those of certain weights. Its methods do not raise."""

    def pause(self) -> None:
        """Everything is a miss and nothing is stored from now on."""

    def resume(self, weights: str) -> None:
        """The weights are those of this name now; pages of others are not wanted any more."""


class Outcome(Enum):
    """What an update came to, on one rank or on all."""

    DONE = "done"
    #: Refused, and surely no weight was changed.
    UNTOUCHED = "untouched"
    #: Failed, or not the same everywhere, or nobody knows.
    DOUBTFUL = "doubtful"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """What an update that changed nothing goes back to."""

    has_old_kv: bool = False
    said: str | None = None
    is_doubtful: bool = False


class LoadedWeights:
    """`is_watching` says whether somebody reports the updates of this process."""

    def __init__(self) -> None:
        self._launch = uuid.uuid4().hex
        self._caches: list[WeightedCache] = []
        self._updates = 0
        self._has_old_kv = False
        self._is_changing = False
        self._is_in_session = False
        self._said: str | None = None
        self._is_doubtful = False
        self._before = _Before()
        self.name = ""
        self.is_watching = False

    @property
    def is_settled(self) -> bool:
        """Whether all KV of this process was made by the weights of `name`, "" for those that it
        was started with.
        """
        return not (self._is_changing or self._is_in_session or self._has_old_kv)

    @property
    def has_cache(self) -> bool:
        """Whether there is anybody who wants to know."""
        return bool(self._caches)

    @property
    def session(self) -> Outcome:
        """What the parts of the present session have come to, on this rank."""
        return Outcome.DOUBTFUL if self._is_doubtful else Outcome.DONE

    def launched_as(self, launch: str) -> None:
        """`launch` is a name that all ranks of this server have, and no other server ever: they
        count the same updates, and so give them the same names without asking each other. Without
        it the ranks of a server find no page after an update that has no version.
        """
        self._launch = launch

    def attach(self, cache: WeightedCache) -> None:
        self._caches.append(cache)
        if not self.is_settled:
            cache.pause()

    def detach(self, cache: WeightedCache) -> None:
        if cache in self._caches:
            self._caches.remove(cache)

    def session_begins(self) -> None:
        """From here to `session_ends` weights may change at any time, in many parts."""
        self._is_in_session = True
        self._said, self._is_doubtful = None, False
        self._pause()

    def session_ends(self, outcome: Outcome = Outcome.DONE, *, is_clean: bool) -> None:
        """`outcome` is that of all ranks; `is_clean` says that there is no KV which was made before
        now.
        """
        self._is_in_session = False
        self._is_doubtful = self._is_doubtful or outcome is not Outcome.DONE
        self._has_old_kv = not is_clean
        self._rename()

    def change_begins(self) -> None:
        """Weights change until `change_ends`."""
        self._before = _Before(
            has_old_kv=self._has_old_kv, said=self._said, is_doubtful=self._is_doubtful
        )
        self._is_changing = True
        self._has_old_kv = True
        if not self._is_in_session:
            self._said, self._is_doubtful = None, False
        self._pause()

    def change_ends(self, version: str | None, outcome: Outcome) -> None:
        """`version` is what the new weights are to be called, None if nobody said. `outcome` is
        that of all ranks, in a session that of this one.
        """
        self._is_changing = False
        if outcome is Outcome.UNTOUCHED and not self._is_in_session:
            self._go_back()
            return
        self._said = version or self._said
        self._is_doubtful = self._is_doubtful or outcome is not Outcome.DONE
        if not self._is_in_session:
            self._rename()

    def flushed(self) -> None:
        """SGLang has dropped all KV on the device and on the host."""
        self._has_old_kv = False
        # In the middle of a change, its end settles it.
        if self.is_settled:
            self._resume()

    def named(self, version: str) -> None:
        """The weights are what they were, and have another name. Weights that nobody is sure of
        keep a name of their own beside it.
        """
        self._said = version
        self.name = f"{version}, {self._fresh}" if self._is_doubtful else version
        if self.is_settled:
            self._resume()

    def lost(self) -> None:
        """Something was not seen: the weights are unknown, and so is what KV is of. Everything is
        a miss until a flush, and then has a name that not even other ranks have. Does not raise.
        """
        # This rank may count other updates than the others from now on.
        self._launch = uuid.uuid4().hex
        self._updates += 1
        self._is_doubtful = self._has_old_kv = True
        self._before = _Before(has_old_kv=True, is_doubtful=True)
        self.name = self._fresh
        for cache in self._caches:
            with kept_inside("pausing a cache"):
                cache.pause()

    @property
    def _fresh(self) -> str:
        """A name that no other weights ever get."""
        return f"update {self._updates} of {self._launch}"

    def _go_back(self) -> None:
        """The update changed nothing; a flush meanwhile counts all the same."""
        before = self._before
        self._has_old_kv = self._has_old_kv and before.has_old_kv
        self._said, self._is_doubtful = before.said, before.is_doubtful
        if self.is_settled:
            self._resume()

    def _rename(self) -> None:
        self._updates += 1
        self.name = self._fresh if self._is_doubtful or not self._said else self._said
        if not self._caches:
            return
        log.info("kvtier: the weights are now %r", self.name)
        if self.is_settled:
            self._resume()
        else:
            log.warning(
                "kvtier: all pages are misses until /flush_cache: KV of the weights before is left"
            )

    def _pause(self) -> None:
        for cache in self._caches:
            cache.pause()

    def _resume(self) -> None:
        for cache in self._caches:
            cache.resume(self.name)


#: Of this process. SGLang makes a backend anew each time one is attached; what it serves stays.
WEIGHTS: Final = LoadedWeights()
