"""SGLang's real HiCache stack without a model: device pool, host pool, radix tree, controller and
storage backend, driven as its scheduler drives them.

The bytes of a prompt's KV are made from a seed, so that another engine, or another process, knows
what it has to find. Runs in the environment of `make sglang-env`; one thread. `shim`
is imported before all of SGLang, and has to be.
"""

from __future__ import annotations

import atexit
import json
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import shim
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

__all__ = ["PROMPT_TOKENS", "Engine", "Setup"]

shim.patch_pools()

PROMPT_TOKENS = 128
#: To SGLang this name says that there is nothing to load.
_NO_MODEL = "dummy"
_POOL_TOKENS = 512
_LAYERS = 4
_HEADS, _HEAD_DIM = 2, 64
_KV_LORA_RANK, _ROPE_DIM = 64, 16
#: The host copy, its acknowledgement and the write to storage are all driven by the event loop.
_SETTLE_S = 1.0
_WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One engine. `layout` is a --hicache-mem-layout, `extra` the backend's extra config, and
    `overrides` what --json-model-override-args would be.
    """

    layout: str
    is_mla: bool = False
    page_size: int = 16
    dtype: str = "bfloat16"
    backend: str = "dynamic"
    overrides: str = "{}"
    extra: dict[str, Any] = field(default_factory=dict)
    seed: int = 1


class Engine:
    """Close it."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._publish(ServerArgs(model_path=_NO_MODEL, page_size=setup.page_size, device="cpu"))
        requests = ReqToTokenPool(
            size=10, max_context_len=1024, device="cpu", enable_memory_saver=False
        )
        self._pool = _device_pool(setup)
        self._slots = TokenToKVPoolAllocator(
            size=_POOL_TOKENS, dtype=self._dtype, device="cpu", kvcache=self._pool, need_sort=False
        )
        params = CacheInitParams(
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=self._slots,
            page_size=setup.page_size,
            disable=False,
            tree_components=(ComponentType.FULL,),
        )
        self._tree = UnifiedRadixCache(params=params)
        self._tree.cache_init_params = params
        args = self._server_args()
        self._publish(args)
        self._tree.init_hicache(args, params)
        # A prompt of a quarter of this pool is far below what a server would call a lot.
        controller = self.controller
        controller.prefetch_capacity_limit = controller.mem_pool_host.size

    @property
    def controller(self) -> Any:
        return self._tree.cache_controller

    def fill(self) -> None:
        """A prompt's KV on the device, in the tree, and so on its way to host and storage."""
        slots = self._slots.alloc(PROMPT_TOKENS).to(torch.int64)
        for buffer, rows in zip(self._buffers(), self._expected(), strict=True):
            buffer[slots] = rows
        self._tree.insert(InsertParams(key=_prompt(), value=slots, prev_prefix_len=0))
        until = time.monotonic() + _SETTLE_S
        self._pump(
            lambda: (
                time.monotonic() > until
                and not self.controller.ack_write_queue
                and not self._tree.ongoing_backup
            )
        )

    def drop_device(self) -> None:
        """Evicts the prompt from the device and overwrites what was there."""
        self._tree.evict(EvictParams(num_tokens=PROMPT_TOKENS))
        for buffer in self._buffers():
            buffer.zero_()

    def prefetch(self) -> int:
        """Storage to host; how many tokens came."""
        handle = CacheRequestHandle("request", 0)
        node = self._match().last_host_node
        self._tree.prefetch_from_storage(handle, node, _prompt().token_ids)
        self._pump(lambda: self._tree.check_prefetch_progress(handle))
        return int(self._tree.pop_prefetch_loaded_tokens(handle))

    def on_host(self) -> int:
        """How many tokens of the prompt host memory has, that the device does not have."""
        return int(self._match().host_hit_length)

    def load_back(self) -> bool:
        """Host to device; whether the whole prompt is there now with the bytes that were made."""
        found = self._match()
        request = SimpleNamespace(
            rid="request",
            last_node=found.last_device_node,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
            last_host_node=found.last_host_node,
            kv=SimpleNamespace(mamba_pool_idx=None),
        )
        self._tree.init_load_back(
            InitLoadBackParams(
                best_match_node=found.best_match_node,
                host_hit_length=found.host_hit_length,
                req=request,
            )
        )
        self._tree.ready_to_load_host_cache()
        self._tree.loading_check()
        slots = self._tree.path_device_indices(self._match().last_device_node)
        return len(slots) == PROMPT_TOKENS and all(
            torch.equal(buffer[slots], rows)
            for buffer, rows in zip(self._buffers(), self._expected(), strict=True)
        )

    def close(self) -> None:
        self._tree.shutdown()
        atexit.unregister(self._tree.shutdown)
        self._tree.release_host_resources()

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self._setup.dtype)

    def _server_args(self) -> ServerArgs:
        setup = self._setup
        args = ServerArgs(
            model_path=_NO_MODEL,
            device="cpu",
            page_size=setup.page_size,
            hicache_io_backend="direct",
            hicache_mem_layout=setup.layout,
            hicache_write_policy="write_through",
            hicache_storage_backend=setup.backend,
            hicache_ratio=2.0,
            hicache_storage_backend_extra_config=json.dumps(setup.extra),
            hicache_storage_prefetch_policy="wait_complete",
            json_model_override_args=setup.overrides,
        )
        args._mamba_cache_chunk_size = 64
        return args

    def _publish(self, args: ServerArgs) -> None:
        set_global_server_args_for_scheduler(args)
        shim.state_ranks()

    def _buffers(self) -> list[torch.Tensor]:
        pool, layers = self._pool, range(_LAYERS)
        keys = [pool.get_key_buffer(layer) for layer in layers]
        if self._setup.is_mla:
            return keys
        return keys + [pool.get_value_buffer(layer) for layer in layers]

    def _expected(self) -> list[torch.Tensor]:
        """The prompt's rows in each buffer, (tokens, heads, dim)."""
        made = torch.Generator().manual_seed(self._setup.seed)
        return [
            torch.randn((PROMPT_TOKENS, *buffer.shape[1:]), generator=made).to(buffer.dtype)
            for buffer in self._buffers()
        ]

    def _match(self) -> Any:
        return self._tree.match_prefix(MatchPrefixParams(key=_prompt()))

    def _pump(self, is_done: Callable[[], bool]) -> None:
        until = time.monotonic() + _WAIT_S
        while not is_done():
            assert time.monotonic() < until, "the event loop did not get there in time"
            self._tree.check_hicache_events()
            time.sleep(0.01)


def _device_pool(setup: Setup) -> Any:
    common = {
        "size": _POOL_TOKENS,
        "page_size": setup.page_size,
        "dtype": getattr(torch, setup.dtype),
        "layer_num": _LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if setup.is_mla:
        return MLATokenToKVPool(kv_lora_rank=_KV_LORA_RANK, qk_rope_head_dim=_ROPE_DIM, **common)
    return MHATokenToKVPool(head_num=_HEADS, head_dim=_HEAD_DIM, **common)


def _prompt() -> RadixKey:
    return RadixKey(array("q", range(1000, 1000 + PROMPT_TOKENS)))
