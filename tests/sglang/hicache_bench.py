"""Real host pools and backends of SGLang for the conformance checks, on one storage.

Runs in the environment of `make sglang-env`; one thread. Close it.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import shim
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvtier_sglang.conformance import Server

__all__ = ["HiCacheBench"]

_PAGE, _TOKENS, _LAYERS, _HEADS, _DIM = 16, 256, 2, 2, 32
_BUDGET_BYTES = 1 << 30


class AttachedBackend:
    """A kvtier_sglang.conformance.Attached."""

    def __init__(self, backend: Any, pool: Any, *, is_v1: bool) -> None:
        self.backend = backend
        self.pool = pool
        self.pages = pool.page_num
        self.page_size = pool.page_size
        self._is_v1 = is_v1

    def set(self, keys: list[str], places: list[int]) -> list[bool] | bool:
        if self._is_v1:
            return self.backend.batch_set_v1(keys, self._slots(places))
        pages = [self.pool.get_data_page(place * self.page_size) for place in places]
        return self.backend.batch_set(keys, pages)

    def get(self, keys: list[str], places: list[int]) -> list[bool]:
        if self._is_v1:
            return self.backend.batch_get_v1(keys, self._slots(places))
        found = self.backend.batch_get(keys, [self.pool.get_dummy_flat_data_page() for _ in keys])
        for place, page in zip(places, found, strict=True):
            if page is not None:
                self.pool.set_from_flat_data_page(place * self.page_size, page)
        return [page is not None for page in found]

    def _slots(self, places: list[int]) -> torch.Tensor:
        return torch.cat(
            [torch.arange(at * self.page_size, (at + 1) * self.page_size) for at in places]
        )


class HiCacheBench:
    """`storage` is where the backend keeps its pages, for damage: a folder of files, or the shared
    memory of a daemon, where pages of other benches lie too: `seed` sets theirs apart.
    """

    def __init__(
        self, backend: str, extra: dict[str, Any], storage: Path, *, seed: int = 0
    ) -> None:
        self._backend = backend
        self._extra = extra
        self._storage = storage
        self._seed = seed
        self._made: list[Any] = []

    def attach(self, server: Server) -> AttachedBackend:
        set_global_server_args_for_scheduler(
            ServerArgs(model_path="dummy", page_size=_PAGE, device="cpu")
        )
        shim.state_ranks()
        get_context().override("conformance", weight_version=server.weight_version)
        pool = _host_pool(server, seed=1000 * self._seed + len(self._made))
        config = HiCacheStorageConfig(
            tp_rank=server.tp_rank,
            tp_size=server.tp_size,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=True,
            is_page_first_layout=server.mem_layout == "page_first",
            model_name=server.model,
            extra_config=self._extra | {"kvtier_model_id": server.model},
        )
        made = StorageBackendFactory.create_backend(self._backend, config, pool)
        made.register_mem_pool_host(pool)
        made.on_host_pools_registered()
        self._made.append(made)
        return AttachedBackend(made, pool, is_v1=bool(self._extra.get("interface_v1")))

    def damage(self, key: str, content: bytes) -> bool:
        path = self._storage
        if path.is_dir():
            (path,) = (path for path in path.iterdir() if key in path.name)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            place = data.find(content)
            if place < 0:
                return False
            data[place + len(content)] ^= 1
        return True

    def close(self) -> None:
        for backend in self._made:
            if hasattr(backend, "close"):
                backend.close()


def _host_pool(server: Server, seed: int) -> Any:
    dtype = getattr(torch, server.dtype)
    layers = tuple(torch.zeros((_TOKENS, _HEADS, _DIM), dtype=dtype) for _ in range(_LAYERS))
    places = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=layers,
            v=layers,
            k_data_ptrs=places,
            v_data_ptrs=places,
            layout=KVBufferLayout.NHD,
        ),
        page_size=_PAGE,
        head_num=_HEADS,
        head_dim=_DIM,
        v_head_dim=_DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(_BUDGET_BYTES):
        pool = MHATokenToKVPoolHost(
            info,
            1.0,
            0,
            _PAGE,
            server.mem_layout,
            device_capacity_tokens=_TOKENS,
            start_layer=0,
            end_layer=_LAYERS,
        )
    made = torch.Generator().manual_seed(seed)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=made))
    return pool
