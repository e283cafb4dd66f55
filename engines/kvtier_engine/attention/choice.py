"""Which attention a pool gets: by where its pages lie, and in which numbers."""

from __future__ import annotations

import torch

from kvtier.client.device import DevicePool
from kvtier_engine.attention.base import Attention
from kvtier_engine.attention.sdpa import SdpaAttention
from kvtier_engine.attention.varlen import VarlenAttention

__all__ = ["attention_for"]

#: What the kernel takes.
_HALF = (torch.bfloat16, torch.float16)


def attention_for(pool: DevicePool) -> Attention:
    """torch's paged kernel for half precision on CUDA, gather and dense attention elsewhere."""
    if pool.device.type == "cuda" and pool.form.dtype in _HALF:
        return VarlenAttention(pool.kv)
    return SdpaAttention(pool.kv)
