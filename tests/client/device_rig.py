"""What tests of the device tier share: devices, pools, tables, and pages that can be told apart."""

from __future__ import annotations

import pytest
import torch

from kvtier.client.device import DevicePool, PageTable

__all__ = ["DEVICES", "fill", "random_rows", "table_of"]

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def random_rows(pool: DevicePool, count: int, seed: int) -> torch.Tensor:
    """Bytes of `count` pages of finite numbers, in host memory."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, *pool.kv.shape[1:])
    return torch.randn(shape, generator=generator).to(pool.form.dtype)


def fill(pool: DevicePool, ids: list[int], seed: int) -> torch.Tensor:
    """Writes random numbers into pages and gives them back as they are in host memory."""
    pages = random_rows(pool, len(ids), seed)
    for page, place in zip(pages, ids, strict=True):
        pool.kv[place].copy_(page)
    return pages


def table_of(pool: DevicePool, pages: int) -> PageTable:
    """The table of a request with so many pages."""
    table = PageTable(pool)
    table.append(pool.allocate(pages))
    return table
