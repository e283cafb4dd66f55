"""What has to be changed in SGLang 0.5.23 for its real HiCache stack to run without an accelerator.

Import it before any module of SGLang, then call `patch_pools`. Changed are: a stream operation that
torch does not have for the CPU, three copy kernels that are imported only where CUDA is, pinned
memory, and the rank numbers that process groups would give. Nothing of what the tests look at
(trees, controllers, host pools, storage) is touched.

In process SGLANG_USE_CPU_ENGINE has to be unset: with it SGLang imports a build of its kernels that
its package index does not offer. A server needs it, and server_hooks, which use parts of this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parent / "stubs"))

import torch

__all__ = ["give_copies", "leave_memory_unpinned", "patch_pools", "state_ranks"]

_RANKS = (
    "tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank", "attn_dcp_rank",
    "moe_ep_rank", "moe_tp_rank",
)  # fmt: skip


def patch_pools() -> None:
    """Makes the host pools usable without CUDA, in a process that has no server."""
    from sglang.srt.mem_cache.pool_host import base, mha, mla

    for module in (mha, mla):
        give_copies(module)
    leave_memory_unpinned(base)
    state_ranks()


def give_copies(module: Any) -> None:
    """To pool_host.mha or pool_host.mla: what it imports where CUDA is."""
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None  # work on the CPU is done when it returns
    for copy in (
        transfer_kv_direct,
        transfer_kv_per_layer_direct_pf_lf,
        transfer_kv_all_layer_direct_lf_pf,
    ):
        setattr(module, copy.__name__, copy)


def leave_memory_unpinned(base: Any) -> None:
    """In pool_host.base."""
    made = base.HostKVCache.__init__

    def without_pinning(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options | {"pin_memory": False})

    base.HostKVCache.__init__ = without_pinning


def state_ranks() -> None:
    """States that this process is rank 0 of 1. Publishing server arguments forgets it."""
    from sglang.srt.runtime_context import get_parallel

    for name in _RANKS:
        get_parallel().override_permanently(**{name: 0})


def _pages(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    return slots.view(-1, page_size)[:, 0] // page_size


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Host (page, layer, token, ...) to one layer of the device (token, ...)."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        rows = source[_pages(src_indices, page_size), layer_id]
        target[dst_indices] = rows.reshape(-1, *target.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers of the device (token, ...) to host (page, layer, token, ...)."""
    layers = len(src_ptrs) // len(dst_ptrs)
    places = _pages(dst_indices, page_size)
    for number, target in enumerate(dst_ptrs):
        for layer in range(layers):
            source = src_ptrs[number * layers + layer]
            target[places, layer] = source[src_indices].reshape(-1, page_size, *target.shape[3:])
