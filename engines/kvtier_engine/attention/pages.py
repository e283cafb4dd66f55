"""How dense attention gets at a pool's pages: rows written into them, whole runs gathered out.

A run is one layer's keys or values of one page, contiguous in every pool. What does not depend on
the layer is made once a pass. A pass belongs to one thread.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvtier.client.device import PageForm
from kvtier_engine.attention.base import Batch

__all__ = ["KvPages", "KvPass", "PlainPages"]


class KvPass(Protocol):
    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """`key`, `value` (rows, kv_heads, dim) to the places that the batch names."""
        ...

    def gathered(self, layer: int, part: int) -> torch.Tensor:
        """Keys (part 0) or values (1) of one layer of all pages that the batch's tables name:
        (sequences * pages, page_tokens, kv_heads, dim) in the dtype that attention computes in.
        """
        ...


class KvPages(Protocol):
    """The pages of one pool."""

    @property
    def form(self) -> PageForm: ...

    @property
    def dtype(self) -> torch.dtype:
        """What attention computes in."""
        ...

    def prepare(self, batch: Batch) -> KvPass: ...


class PlainPages:
    """Over `kv` (pages, 2, layers, page_tokens, kv_heads, dim), contiguous: as they were computed,
    so that a gather copies whole runs and nothing else. `form` is that of the pages.
    """

    def __init__(self, kv: torch.Tensor, form: PageForm) -> None:
        self._kv = kv
        self.form = form
        self.dtype = form.dtype

    def prepare(self, batch: Batch) -> _PlainPass:
        return _PlainPass(self._kv, batch)


class _PlainPass:
    def __init__(self, kv: torch.Tensor, batch: Batch) -> None:
        pages, _, self._layers = kv.shape[:3]
        self._kv = kv
        self._batch = batch
        #: One row a page, part and layer.
        self._runs = kv.view(pages * 2 * self._layers, *kv.shape[3:])
        self._first_runs = (batch.tables * (2 * self._layers)).reshape(-1)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        batch = self._batch
        self._kv[batch.pages, 0, layer, batch.offsets] = key
        self._kv[batch.pages, 1, layer, batch.offsets] = value

    def gathered(self, layer: int, part: int) -> torch.Tensor:
        return self._runs.index_select(0, self._first_runs + (part * self._layers + layer))
