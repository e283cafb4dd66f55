"""Which weights this process serves, from its start through every online update.

Promise: a page is stored and found under the name of the weights that made it. From the moment an
update begins the caches are paused; they go on, under another name, when the update has ended and
SGLang has dropped the KV that was made before. An update that was not given a version, was given
the present one, or failed, has a name that no other weights ever get.

Whoever gives two different sets of weights one version has said that they are the same.

Belongs to the scheduler's thread, in which SGLang updates weights, flushes and attaches. Nothing of
SGLang is loaded.
"""

from __future__ import annotations

import logging
import uuid
from typing import Final, Protocol

__all__ = ["WEIGHTS", "LoadedWeights", "WeightedCache"]

log = logging.getLogger(__name__)


class WeightedCache(Protocol):
    """A cache whose pages are those of certain weights. Its methods do not raise."""

    def pause(self) -> None:
        """Everything is a miss and nothing is stored from now on."""

    def resume(self, weights: str) -> None:
        """The weights are those of this name now; pages of others are not wanted any more."""


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
        self.name = ""
        self.is_watching = False

    @property
    def is_settled(self) -> bool:
        """Whether all KV of this process was made by the weights of `name`, "" for those that it
        was started with.
        """
        return not (self._is_changing or self._is_in_session or self._has_old_kv)

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

    def session_ends(self, *, is_clean: bool) -> None:
        """`is_clean` says that there is no KV which was made before now."""
        self._is_in_session = False
        self._has_old_kv = not is_clean
        self._rename()

    def change_begins(self) -> None:
        """Weights change until `change_ends`."""
        self._is_changing = True
        self._has_old_kv = True
        if not self._is_in_session:
            self._said, self._is_doubtful = None, False
        self._pause()

    def change_ends(self, version: str | None, *, is_done: bool) -> None:
        """`version` is what the new weights are to be called, None if nobody said."""
        self._is_changing = False
        self._said = version or self._said
        self._is_doubtful = self._is_doubtful or not is_done
        if not self._is_in_session:
            self._rename()

    def flushed(self) -> None:
        """SGLang has dropped all KV on the device and on the host."""
        self._has_old_kv = False
        # In the middle of a change, its end settles it.
        if self.is_settled:
            self._resume()

    def named(self, version: str) -> None:
        """The weights are what they were, and have another name."""
        self._said = self.name = version
        if self.is_settled:
            self._resume()

    def _rename(self) -> None:
        self._updates += 1
        fresh = f"update {self._updates} of {self._launch}"
        self.name = fresh if self._is_doubtful or not self._said else self._said
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
