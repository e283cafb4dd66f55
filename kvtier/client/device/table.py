"""PageTable: the pages of one request, and the tags they had when it got them.

`pages` is what attention reads by; `TagTracker.verify` compares it with `tags`, where it lies. One
thread, the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.client.device.errors import PageNotHeld
from kvtier.client.device.pool import NO_TAG, DevicePool, on_device

__all__ = ["PageTable"]

_ROOM_AT_FIRST = 16


class PageTable:
    """At first empty. Holds one reference of each of its pages, which `release` gives back."""

    def __init__(self, pool: DevicePool) -> None:
        self.pool = pool
        self._ids: list[int] = []
        self._known: list[int] = []
        self._make_room(_ROOM_AT_FIRST)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> tuple[int, ...]:
        """The pages in order, as the host knows them."""
        return tuple(self._ids)

    @property
    def pages(self) -> torch.Tensor:
        """int32 (n,) on the device, a view: the block table of this request."""
        return self._pages[: len(self._ids)]

    @property
    def tags(self) -> torch.Tensor:
        """int64 (n,) on the device: the tags that the pages had when they were appended."""
        return self._tags[: len(self._ids)]

    @property
    def pages_here(self) -> NDArray[np.int32]:
        """`pages` as an ndarray, of a pool in host memory alone."""
        return self._pages_np[: len(self._ids)]

    @property
    def tags_here(self) -> NDArray[np.int64]:
        """`tags` as an ndarray, of a pool in host memory alone."""
        return self._tags_np[: len(self._ids)]

    def append(self, ids: Sequence[int]) -> None:
        """Takes over one reference of each page (of `allocate` or `share`) and records its tag.
        Raises PageNotHeld for a page that is free.
        """
        if not ids:
            return
        tags = self.pool.known_tags(ids)
        if NO_TAG in tags:
            raise PageNotHeld(
                f"append: page {ids[tags.index(NO_TAG)]} is free",
                remedy="append what `allocate` gave, or `share` a page that is held",
            )
        start, end = len(self._ids), len(self._ids) + len(ids)
        if end > len(self._pages):
            old_pages, old_tags = self.pages, self.tags
            self._make_room(2 * end)
            self._pages[:start] = old_pages
            self._tags[:start] = old_tags
        device = self.pool.device
        self._pages[start:end] = on_device(ids, torch.int32, device)
        self._tags[start:end] = on_device(tags, torch.int64, device)
        self._ids += ids
        self._known += tags

    def truncate(self, count: int) -> tuple[int, ...]:
        """Keeps the first `count` pages and gives the others back, as `release`."""
        ids, known = self._ids[count:], self._known[count:]
        del self._ids[count:], self._known[count:]
        now = self.pool.known_tags(ids)
        is_ours = [tag == before for tag, before in zip(now, known, strict=True)]
        self.pool.free([page for page, ours in zip(ids, is_ours, strict=True) if ours])
        return tuple(page for page, ours in zip(ids, is_ours, strict=True) if not ours)

    def release(self) -> tuple[int, ...]:
        """Gives every page back and is empty then; may be used anew.

        A page whose tag has changed is not this request's any more and is left to whoever has it;
        these ids are returned (a sound engine never sees one).
        """
        return self.truncate(0)

    def _make_room(self, count: int) -> None:
        device = self.pool.device
        self._pages = torch.zeros(count, dtype=torch.int32, device=device)
        self._tags = torch.zeros(count, dtype=torch.int64, device=device)
        # The same memory, where the host can see it.
        if device.type == "cpu":
            self._pages_np, self._tags_np = self._pages.numpy(), self._tags.numpy()
