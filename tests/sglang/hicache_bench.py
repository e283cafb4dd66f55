"""Real host pools and backends of SGLang for the conformance checks, on one storage.

Runs in the environment of `make sglang-env`; one thread. Close it.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import host_pools
import shim
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvtier_sglang.conformance import Server
from kvtier_sglang.conformance_v2 import Asked, Hits

__all__ = ["HiCacheBench"]


class AttachedBackend:
    """A kvtier_sglang.conformance.Attached, and a SideAttached of conformance_v2."""

    def __init__(
        self, backend: Any, pool: Any, sides: dict[str, Any] | None = None, *, is_v1: bool
    ) -> None:
        self.backend = backend
        self.pool = pool
        self.sides = sides or {}
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

    def exists_v2(self, keys: list[str], *asked: Asked) -> Hits:
        transfers = [
            PoolTransfer(
                name=PoolName(one.pool),
                keys=None if one.window is None else ["" for _ in range(one.window)],
                hit_policy=PoolHitPolicy.ALL_PAGES
                if one.window is None
                else PoolHitPolicy.TRAILING_PAGES,
            )
            for one in asked
        ]
        found = self.backend.batch_exists_v2(keys, transfers)
        by_pool = {str(name): pages for name, pages in found.extra_pool_hit_pages.items()}
        return Hits(
            pages=found.kv_hit_pages, by_pool=by_pool, lengths=found.restorable_prefix_pages
        )

    def set_v2(self, pool: str, keys: list[str], places: list[int]) -> list[bool]:
        return self.backend.batch_set_v2([self._transfer(pool, keys, places)])[pool]

    def get_v2(self, pool: str, keys: list[str], places: list[int]) -> list[bool]:
        return self.backend.batch_get_v2([self._transfer(pool, keys, places)])[pool]

    def cut_v2(self, pool: str, keys: list[str]) -> dict[str, list[bool]]:
        transfer = self._transfer(pool, keys, list(range(len(keys))))
        transfer.host_indices = transfer.host_indices[:-1]
        found = self.backend.batch_get_v2([transfer])
        return {str(name): hits for name, hits in found.items()}

    def side_page(self, pool: str, place: int) -> torch.Tensor:
        side = self.sides[pool]
        return side.get_data_page(place * side.page_size).clone()

    def _transfer(self, pool: str, keys: list[str], places: list[int]) -> PoolTransfer:
        slots = self._slots(places, self.sides[pool].page_size)
        return PoolTransfer(name=PoolName(pool), keys=keys, host_indices=slots)

    def _slots(self, places: list[int], page: int = 0) -> torch.Tensor:
        size = page or self.page_size
        return torch.cat([torch.arange(at * size, (at + 1) * size) for at in places])


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
            ServerArgs(model_path="dummy", page_size=host_pools.PAGE, device="cpu")
        )
        shim.state_ranks()
        get_context().override("conformance", weight_version=server.weight_version)
        pool, sides = _host_pools(server, seed=1000 * self._seed + len(self._made))
        config = HiCacheStorageConfig(
            tp_rank=server.tp_rank,
            tp_size=server.tp_size,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=server.is_latent,
            enable_storage_metrics=True,
            is_page_first_layout=server.mem_layout == "page_first",
            model_name=server.model,
            extra_config=self._extra | {"kvtier_model_id": server.model},
        )
        made = StorageBackendFactory.create_backend(self._backend, config, pool)
        self._made.append(made)
        made.register_mem_pool_host(pool)
        for name, side in (("kv", pool), *sides.items()):
            made.register_mem_host_pool_v2(side, PoolName(name))
        made.on_host_pools_registered()
        return AttachedBackend(made, pool, sides, is_v1=bool(self._extra.get("interface_v1")))

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


def _host_pools(server: Server, seed: int) -> tuple[Any, dict[str, Any]]:
    """The primary pool and those beside it."""
    make = host_pools.latent_pool if server.is_latent else host_pools.heads_pool
    primary = make(server.mem_layout, dtype=server.dtype, seed=seed)
    given = {"dtype": server.side_dtype, "layers": server.side_layers, "seed": seed + 1}
    sides = {}
    for name in server.sides:
        if name == "mamba":
            sides[name] = host_pools.states_pool(server.mem_layout, **given)
        elif name == "indexer":
            layers = server.side_layers
            sides[name] = host_pools.indexer_pool(primary, layers=layers, seed=seed + 1)
        else:
            sides[name] = host_pools.heads_pool(server.mem_layout, **given)
    return primary, sides
