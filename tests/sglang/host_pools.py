"""SGLang's own host pools on a CPU, without an engine: of keys and values, latents, states of
linear attention and keys of an indexer, each of random content.

Runs in the environment of `make sglang-env`; one thread. `shim` is imported before all of SGLang.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import shim
import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.host_pool_decl import HostPoolDecl, HostPoolStorageInfo
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

__all__ = ["PAGE", "TOKENS", "heads_pool", "indexer_pool", "latent_pool", "states_pool"]

PAGE, TOKENS = 16, 256
_BUDGET_BYTES = 1 << 30
_HEADS, _DIM = 2, 32
_KV_LORA_RANK, _ROPE_DIM = 32, 16
_INDEX_DIM, _QUANT_BLOCK = 128, 128
_CONV, _TEMPORAL = (24, 3), (4, 16, 8)

shim.state_ranks()


def heads_pool(
    mem_layout: str, *, dtype: str = "bfloat16", layers: int = 2, seed: int = 0, page: int = PAGE
) -> Any:
    kind = getattr(torch, dtype)
    buffers = tuple(torch.zeros((TOKENS, _HEADS, _DIM), dtype=kind) for _ in range(layers))
    places = _places(buffers)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=buffers, v=buffers, k_data_ptrs=places, v_data_ptrs=places, layout=KVBufferLayout.NHD
        ),
        page_size=page,
        head_num=_HEADS,
        head_dim=_DIM,
        v_head_dim=_DIM,
        dtype=kind,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(_BUDGET_BYTES):
        pool = MHATokenToKVPoolHost(
            info,
            1.0,
            0,
            page,
            mem_layout,
            pin_memory=False,
            device_capacity_tokens=TOKENS,
            start_layer=0,
            end_layer=layers,
        )
    return _filled(pool, [pool.kv_buffer], seed)


def latent_pool(mem_layout: str, *, dtype: str = "bfloat16", layers: int = 2, seed: int = 0) -> Any:
    kind = getattr(torch, dtype)
    dim = _KV_LORA_RANK + _ROPE_DIM
    buffers = tuple(torch.zeros((TOKENS, 1, dim), dtype=kind) for _ in range(layers))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=_places(buffers),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=PAGE,
        kv_lora_rank=_KV_LORA_RANK,
        qk_rope_head_dim=_ROPE_DIM,
        kv_cache_dim=dim,
        dtype=kind,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(_BUDGET_BYTES):
        pool = MLATokenToKVPoolHost(
            info,
            1.0,
            0,
            PAGE,
            mem_layout,
            pin_memory=False,
            device_capacity_tokens=TOKENS,
            start_layer=0,
            end_layer=layers,
            target_layer_num=layers,
        )
    return _filled(pool, [pool.kv_buffer], seed)


def states_pool(mem_layout: str, *, dtype: str = "bfloat16", layers: int = 2, seed: int = 0) -> Any:
    """As Mamba has them: float32 after the recurrence, `dtype` after the convolution, and a row of
    its own beside the layers.
    """
    slots, kind = TOKENS // PAGE, getattr(torch, dtype)
    info = MambaStateBufferInfo(
        temporal=torch.zeros((layers, slots, *_TEMPORAL), dtype=torch.float32),
        conv=(torch.zeros((layers, slots, *_CONV), dtype=kind),),
        extra_checkpoint_buffers=(torch.zeros((slots, 5), dtype=torch.float32),),
    )
    with host_memory_budget_scope(_BUDGET_BYTES):
        pool = MambaPoolHost(
            info, 1.0, 0, device_capacity=slots, pin_memory=False, layout=mem_layout
        )
    return _filled(pool, pool.kv_buffer, seed)


def indexer_pool(anchor: Any, *, layers: int = 2, seed: int = 0) -> Any:
    """Of DeepSeek's sparse attention, beside the host pool `anchor` of latents."""
    per_token = _INDEX_DIM + _INDEX_DIM // _QUANT_BLOCK * 4
    pages = TOKENS // PAGE
    device = SimpleNamespace(
        device="cpu",
        store_dtype=torch.bfloat16,
        start_layer=0,
        end_layer=layers,
        layer_num=layers,
        layer_shard_enabled=False,
        index_head_dim=_INDEX_DIM,
        quant_block_size=_QUANT_BLOCK,
        index_k_with_scale_buffer=[
            torch.zeros((pages, per_token * PAGE), dtype=torch.uint8) for _ in range(layers)
        ],
    )
    decl = HostPoolDecl(
        pool_name=PoolName.INDEXER,
        device_pool=device,
        indices_from_pool=PoolName.KV,
        layout_source=PoolName.KV,
        storage_info=HostPoolStorageInfo(bytes_per_token_per_layer=per_token, dtype=torch.uint8),
        host_pool_builder=None,
    )
    with host_memory_budget_scope(_BUDGET_BYTES):
        pool = DSAIndexerPoolHost(decl, anchor, pin_memory=False)
    return _filled(pool, [pool.index_k_with_scale_buffer], seed)


def _places(buffers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)


def _filled(pool: Any, buffers: Any, seed: int) -> Any:
    made = torch.Generator().manual_seed(seed)
    for buffer in buffers:
        if buffer.dtype == torch.uint8:
            buffer.copy_(torch.randint(0, 256, buffer.shape, generator=made))
        else:
            buffer.copy_(torch.randn(buffer.shape, generator=made))
    return pool
