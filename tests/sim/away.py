"""Devices that are away, for whole boots or part of one, and the pages that come back with them.

A page waits from the moment its device goes. It is not waited for any more when it is deleted, put
again, hurt or bumped, when the device comes back under a running daemon, which writes to it, or
when the daemon has said that it gives the device's pages up.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable

from tests.sim.oracle import Oracle, Space

__all__ = ["Away"]

Page = tuple[Space, bytes]


class Away:
    def __init__(self, oracle: Oracle, *, devices: int, seed: int) -> None:
        # Its own: so that a seed without it is the run that it was.
        self._rng = random.Random(f"{seed} away")
        self._oracle = oracle
        self._devices = devices
        self._is_used = devices > 1 and self._rng.random() < 0.5
        self._has_begun = False
        #: The devices that are not there in this boot.
        self.absent: frozenset[int] = frozenset()

    def next_boot(self) -> None:
        """Now and then it has to do without a device; the first one has all."""
        is_without = self._has_begun and self._is_used and self._rng.random() < 0.5
        self.absent = frozenset([self._rng.randrange(self._devices)] if is_without else [])
        self._has_begun = True

    def went(self, pages: Iterable[tuple[Page, tuple[int, int]]]) -> None:
        """These pages lie on devices that have gone: ((space, key), (generation, device))."""
        for (space, key), place in pages:
            if not (space.is_ended or space.is_ending or key in space.hurt):
                space.waiting[key] = place
                space.several.add(key)

    def drop(self, devices: Collection[int] | None = None) -> None:
        """The pages of these devices, or of all, need not come back."""
        for space in self._oracle.every:
            for key, (_, device) in list(space.waiting.items()):
                if devices is None or device in devices:
                    del space.waiting[key]

    def power_cut(self) -> None:
        """Only what was synced before is safe."""
        for space in self._oracle.every:
            for key, (generation, _) in list(space.waiting.items()):
                if generation not in self._oracle.safe:
                    del space.waiting[key]

    def back(self) -> list[Page]:
        """Those whose device is there again, and which have to be found."""
        found = []
        for space in self._oracle.every:
            for key, (_, device) in list(space.waiting.items()):
                if device not in self.absent:
                    del space.waiting[key]
                    if not space.is_ended:
                        found.append((space, key))
        return found
