"""Which attention a pool gets: by where its pages lie, and in which numbers. Decided here alone.

The name of the choice is part of the pages' family: other kernels give numbers that differ in their
last bits, and one way of doing it runs other kernels on each type of device.
"""

from __future__ import annotations

import enum

import torch

from kvtier.client.device import DevicePool, PageForm
from kvtier_engine.attention.base import Attention
from kvtier_engine.attention.fp8 import Fp8Pages
from kvtier_engine.attention.pages import PlainPages
from kvtier_engine.attention.sdpa import SdpaAttention
from kvtier_engine.attention.varlen import VarlenAttention

__all__ = ["Kernel", "attention_for", "kernel_for", "kernel_name"]

#: What the paged kernel takes.
_HALF = (torch.bfloat16, torch.float16)


class Kernel(enum.Enum):
    """VARLEN is torch's paged kernel; GATHER gathers pages and runs dense attention; GATHER_FP8
    unpacks fp8 pages as it gathers.
    """

    GATHER = "gather"
    GATHER_FP8 = "gather fp8"
    VARLEN = "varlen"


def kernel_for(device: torch.device, form: PageForm) -> Kernel:
    """The paged kernel for pages in half precision on CUDA, gather and dense attention elsewhere.
    `form` is that of the pages.
    """
    if form.is_fp8:
        return Kernel.GATHER_FP8
    is_paged = device.type == "cuda" and form.dtype in _HALF
    return Kernel.VARLEN if is_paged else Kernel.GATHER


def kernel_name(device: torch.device, form: PageForm) -> str:
    """As a family of pages has it: "cpu gather", "cuda varlen"."""
    return f"{device.type} {kernel_for(device, form).value}"


def attention_for(pool: DevicePool, dtype: torch.dtype) -> Attention:
    """For a network that computes in `dtype`."""
    match kernel_for(pool.device, pool.form):
        case Kernel.GATHER_FP8:
            return SdpaAttention(Fp8Pages(pool, dtype))
        case Kernel.VARLEN:
            return VarlenAttention(pool.kv)
        case Kernel.GATHER:
            return SdpaAttention(PlainPages(pool.kv, pool.form))
