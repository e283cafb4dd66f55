"""Which attention a pool gets: by where its pages lie, and in which numbers.

Its name is part of the pages' family: two kernels give numbers that differ in their last bits.
"""

from __future__ import annotations

import enum

import torch

from kvtier.client.device import DevicePool
from kvtier_engine.attention.base import Attention
from kvtier_engine.attention.fp8 import Fp8Pages
from kvtier_engine.attention.pages import PlainPages
from kvtier_engine.attention.sdpa import SdpaAttention
from kvtier_engine.attention.varlen import VarlenAttention

__all__ = ["Kernel", "attention_for", "kernel_for"]

#: What the paged kernel takes.
_HALF = (torch.bfloat16, torch.float16)


class Kernel(enum.Enum):
    """VARLEN is torch's paged kernel; GATHER gathers pages and runs dense attention."""

    GATHER = "gather"
    VARLEN = "varlen"


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The paged kernel for pages in half precision on CUDA, gather and dense attention elsewhere.
    `dtype` is that of the pages.
    """
    is_paged = device.type == "cuda" and dtype in _HALF
    return Kernel.VARLEN if is_paged else Kernel.GATHER


def attention_for(pool: DevicePool, dtype: torch.dtype) -> Attention:
    """For a network that computes in `dtype`."""
    if pool.form.is_fp8:
        return SdpaAttention(Fp8Pages(pool, dtype))
    if kernel_for(pool.device, pool.form.dtype) is Kernel.VARLEN:
        return VarlenAttention(pool.kv)
    return SdpaAttention(PlainPages(pool.kv))
