"""A page that is served from memory of its own, because the arena has no room for it."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.transfer.place import Copy

__all__ = ["Bounced"]


class Bounced:
    """`count` hears how many bytes it takes, and at `release` that it takes them no more."""

    def __init__(self, count: Callable[[int], None], size: int) -> None:
        self._count = count
        self._size = size
        self.copy: Copy | None = None
        count(size)

    def release(self) -> None:
        self._count(-self._size)
        self._size = 0
        self.copy = None
