"""Are the pages that requests are about to read still those that they were given?

After DESIGN's per-page tags: a request records the tag of each page; before a decode step one
batched gather and compare finds every request whose table names a page of another allocation: one
that was freed and given to somebody else, an index off by one, two pages swapped, a table from
before a preemption. Outside attention, so no kernel knows of it.

One thread and stream: those that allocate and decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.client.device.pool import DevicePool, on_device
from kvtier.client.device.table import PageTable

__all__ = ["NoopTracker", "TagTracker", "Tracker", "verify_on_device"]


class Tracker(Protocol):
    """What an engine asks before it reads."""

    def verify(self, tables: Sequence[PageTable]) -> torch.Tensor:
        """bool (requests,): True where every page of the table is the one that was recorded."""


class NoopTracker:
    """Believes every table: nothing is read, nothing is launched on the device."""

    def __init__(self) -> None:
        self._sound = torch.ones(0, dtype=torch.bool)

    def verify(self, tables: Sequence[PageTable]) -> torch.Tensor:
        """True for every request, in host memory."""
        if len(tables) > len(self._sound):
            self._sound = torch.ones(2 * len(tables), dtype=torch.bool)
        return self._sound[: len(tables)]


class TagTracker:
    """Compares tags on the pool's device; tables must be of this pool."""

    def __init__(self, pool: DevicePool) -> None:
        self._tags = pool.edged_tags
        # Of a pool in host memory numpy asks for less than the start of one torch operation.
        self._here = pool.edged_tags.numpy() if pool.device.type == "cpu" else None

    def verify(self, tables: Sequence[PageTable]) -> torch.Tensor:
        """bool (requests,) on the device; reading it waits for the device. An id outside the pool
        is a mismatch, not an access outside.
        """
        if not tables:
            return torch.ones(0, dtype=torch.bool, device=self._tags.device)
        if self._here is not None:
            return torch.from_numpy(_verify_here(self._here, tables))
        return verify_on_device(self._tags, tables)


def verify_on_device(edged_tags: torch.Tensor, tables: Sequence[PageTable]) -> torch.Tensor:
    """TagTracker.verify by torch, for any device: `edged_tags` are the pool's, and there is a table
    at least. Nothing waits for the device.
    """
    device = edged_tags.device
    pages = torch.cat([table.pages for table in tables])
    recorded = torch.cat([table.tags for table in tables])
    places = pages.clamp_(-1, len(edged_tags) - 2).add_(1)
    present = edged_tags.index_select(0, places)
    wrong = torch.zeros(len(pages) + 1, dtype=torch.int32, device=device)
    torch.cumsum(present != recorded, 0, dtype=torch.int32, out=wrong[1:])
    ends = on_device([0, *accumulate(map(len, tables))], torch.int64, device)
    return wrong.index_select(0, ends).diff() == 0


def _verify_here(edged_tags: NDArray[np.int64], tables: Sequence[PageTable]) -> NDArray[np.bool_]:
    """The same of a pool in host memory."""
    pages = np.concatenate([table.pages_here for table in tables])
    recorded = np.concatenate([table.tags_here for table in tables])
    wrong = edged_tags.take(pages + 1, mode="clip") != recorded
    sound = np.ones(len(tables), np.bool_)
    if wrong.any():
        owners = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        sound[owners[wrong]] = False
    return sound
