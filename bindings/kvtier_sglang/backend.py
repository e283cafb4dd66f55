"""`KvTierHiCacheStorage`: what SGLang loads for `--hicache-storage-backend dynamic`.

A thin face: it says which pools and model it is, once, when it is attached, and refuses there what
cannot be stored; after that every call is answered by a `PageStore` for each pool, and none raises.
The primary KV pool is served by interface v1 and by the generic calls, pools beside it by v2.

SGLang makes and attaches it in the scheduler's thread, then calls exists, get and set from a thread
each, and `get_stats` in every step of the scheduler.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import kvtier
from kvtier_sglang.border import answers, kept_inside
from kvtier_sglang.budget import Budget
from kvtier_sglang.engine_metrics import EngineMetrics
from kvtier_sglang.errors import UnsupportedSglang
from kvtier_sglang.events.publisher import EventPublisher, EventSource, publisher_for
from kvtier_sglang.identities import identity_of, revision_of
from kvtier_sglang.layouts import PartLayout, Ranks, part_layouts
from kvtier_sglang.misses import (
    all_absent,
    all_missed,
    none_moved,
    none_there,
    not_one,
    nothing,
    refused,
)
from kvtier_sglang.options import Options
from kvtier_sglang.pools import page_places, rows_of, shape_of
from kvtier_sglang.sglang_api import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
    StorageMetrics,
    draft_model,
    replica_of,
    require_sglang,
    served_model,
    state_kernels,
    transfer_result,
)
from kvtier_sglang.side_pools import Model, side_pool
from kvtier_sglang.sides import SidePools
from kvtier_sglang.store import PageStore, StoreState
from kvtier_sglang.weights import WEIGHTS

__all__ = ["KvTierHiCacheStorage"]

log = logging.getLogger(__name__)

#: Of a model's name; the end of a path says more than its beginning.
_NAME_CHARACTERS_MAX: Final = 60


class KvTierHiCacheStorage(HiCacheStorage):  # type: ignore[misc]
    """Its options are those of kvtier_sglang.options, in the extra config with `kvtier_` before."""

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Sends nothing yet. Raises ConfigError, UnsupportedSglang."""
        require_sglang()
        self._config = storage_config
        self._options = Options.of(storage_config.extra_config)
        self._replica = replica_of(storage_config)
        self._metrics = EngineMetrics(
            tp_rank=storage_config.tp_rank,
            pp_rank=storage_config.pp_rank,
            dp_rank=self._replica,
        )
        self._store: PageStore | None = None
        self._events: EventPublisher | None = None
        self._pool: Any = None
        self._served = served_model()
        # Before the first request: compiled code takes half a second to load, and a minute to be
        # made where it never was.
        kvtier.warm_up()
        self._connection = kvtier.connect(
            self._options.endpoint,
            deadline=self._options.get_deadline,
            client_name=_client_name(storage_config, self._replica),
        )
        self._sides = SidePools(self._connection, self._options)
        self._model: Model | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Raises LayoutError for a pool that cannot be stored, NamespaceMismatch where the daemon
        has other weights or another division into ranks under this name, UnsupportedSglang where
        nobody would see updates of the weights: each fails the attach.
        """
        super().register_mem_pool_host(mem_pool_host)
        config, options, served = self._config, self._options, self._served
        _require_watching(options)
        for name in ("attn_cp_size", "dcp_size"):
            if getattr(config, name, 1) != 1:
                raise kvtier.LayoutError(
                    f"{name} is {getattr(config, name)}",
                    remedy="run without context parallelism, or without this storage backend",
                )
        shape = shape_of(mem_pool_host)
        identity = identity_of(
            served,
            options,
            name=config.model_name or "",
            updated_to=WEIGHTS.name,
            pool_format=str(mem_pool_host.dtype).removeprefix("torch."),
            itemsize=mem_pool_host.dtype.itemsize,
        )
        ranks = Ranks(
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            pp_rank=config.pp_rank,
            pp_size=config.pp_size,
            model_layers=options.model_layers,
        )
        parts = part_layouts(shape, identity, ranks)
        self._pool = mem_pool_host
        self._model = Model(
            identity=identity,
            ranks=ranks,
            page_tokens=shape.page_tokens,
            is_replicated=config.is_mla_model,
            stated_format=options.kv_dtype or served.kv_cache_dtype,
        )
        self._store = PageStore(self._connection, parts, rows_of(mem_pool_host, shape), options)
        self._events = self._publisher(self._store, parts)
        WEIGHTS.attach(self)
        log.info("kvtier: attached, %s, %s, %s at %s", shape, identity, ranks, self._connection.url)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """SGLang calls it for the primary pool too, which is registered then, and later for pools
        that come by and by. Raises LayoutError for what cannot be stored, NamespaceMismatch,
        UnsupportedSglang: when it is attached, that fails it.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name == "kv":
            return
        if self._model is None:
            raise kvtier.LayoutError(
                f"side pool {name} without a primary one", remedy="register the primary one first"
            )
        revision = revision_of(self._served, self._options, WEIGHTS.name)
        model = replace(
            self._model,
            identity=replace(self._model.identity, weights_revision=revision),
            draft=draft_model(),
            state_kernels=state_kernels(),
        )
        store = self._sides.add(side_pool(name, host_pool, model))
        if not WEIGHTS.is_settled:
            store.pause()
        log.info("kvtier: attached, side pool %s (%s)", name, type(host_pool).__name__)

    @answers(not_one)
    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many pages from the first on are there. Advice: a page can leave before the get."""
        return 0 if self._store is None else self._store.exists(keys)

    @answers(all_missed)
    def batch_get_v1(
        self,
        keys: Sequence[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Pages to the slots `host_indices` of the pool, page after page. Only a True page is
        there, whole and verified; nothing is written when this has returned.
        """
        store, places = self._placed(keys, host_indices)
        return store.get(keys, places)

    @answers(all_missed)
    def batch_set_v1(
        self,
        keys: Sequence[str],
        host_indices: Any,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Stores pages from the slots `host_indices` of the pool. The pool's bytes have been read
        when this has returned.
        """
        store, places = self._placed(keys, host_indices)
        return store.set(keys, places, getattr(extra_info, "prefix_keys", None) or ())

    @answers(none_there)
    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Which prefixes of `keys` the primary pool and each of `pool_transfers` can restore."""
        if self._store is None:
            return none_there()
        found = self._sides.exists(self._store, keys, pool_transfers or ())
        return transfer_result(found.longest, found.by_pool, found.lengths)

    @answers(none_moved)
    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[Any, list[bool]]:
        """Pages of side pools to their slots; see `batch_get_v1`."""
        return self._sides.get(transfers)

    @answers(none_moved)
    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[Any, list[bool]]:
        """Stores pages of side pools from their slots; see `batch_set_v1`."""
        return self._sides.set(transfers, getattr(extra_info, "prefix_keys", None) or ())

    @answers(nothing)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The page as a flat tensor, in `target_location` if there is one; None for a miss."""
        targets = None if target_location is None else [target_location]
        return self.batch_get([key], targets)[0]

    @answers(all_absent)
    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """The pages as flat tensors, None for each from the first miss on."""
        if self._store is None:
            return [None] * len(keys)
        targets = target_locations or [self._pool.get_dummy_flat_data_page() for _ in keys]
        found = self._store.get_flat(keys, targets)
        return [page if is_hit else None for page, is_hit in zip(targets, found, strict=True)]

    @answers(refused)
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Whether the page is in the cache now."""
        return self.batch_set([key], [target_location if value is None else value])

    @answers(refused)
    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Whether all pages are in the cache now; `values` are flat pages."""
        sources = target_locations if values is None else values
        if self._store is None or sources is None:
            return False
        return all(self._store.set_flat(keys, sources))

    @answers(refused)
    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    @answers(nothing)
    def clear(self) -> None:
        """Deletes every page of this model, in all tiers, also those of other servers of it."""
        budget = Budget(self._options.set_deadline)
        for store in self._stores:
            with kept_inside("clearing a pool"):
                store.clear(budget)

    @property
    def state(self) -> StoreState | None:
        """Whether pages can be found now, and why not; None before a host pool is registered. With
        side pools the first reason of any.
        """
        states = [store.state for store in self._stores]
        return next((state for state in states if state is not StoreState.OPEN), None) or next(
            iter(states), None
        )

    @answers(nothing)
    def get_stats(self) -> Any:
        """What was moved since the last call; None without --enable-metrics."""
        if self._store is None or not self._config.enable_storage_metrics:
            return None
        got, put = self._store.got.take(), self._store.put.take()
        is_telling = None if self._events is None else self._events.is_telling
        self._metrics.tell(got, put, self.state or self._store.state, is_telling=is_telling)
        return StorageMetrics(
            prefetch_pgs=got.pages,
            prefetch_bandwidth=got.bandwidths,
            backup_pgs=put.pages,
            backup_bandwidth=put.bandwidths,
        )

    @answers(nothing)
    def pause(self) -> None:
        """See kvtier_sglang.weights: an online update begins."""
        for store in self._stores:
            store.pause()

    @answers(nothing)
    def resume(self, weights: str) -> None:
        """See kvtier_sglang.weights: from now on the weights have this name."""
        budget = Budget(self._options.set_deadline)
        for store in self._stores:
            with kept_inside("going on with a pool"):
                store.resume(revision_of(self._served, self._options, weights), budget)

    @answers(nothing)
    def close(self) -> None:
        WEIGHTS.detach(self)
        if self._events is not None:
            self._events.close()
        self._store = None
        self._sides.drop()
        self._connection.close()

    @property
    def _stores(self) -> list[PageStore]:
        """Of the primary pool and those beside it."""
        return [] if self._store is None else [self._store, *self._sides.stores]

    def _publisher(self, store: PageStore, parts: Sequence[PartLayout]) -> EventPublisher | None:
        """Of KV events: one for all ranks of a replica. Raises InvalidConfigValue, MissingExtra."""
        config, options = self._config, self._options
        if not options.events_endpoint or config.tp_rank or config.pp_rank:
            return None
        layout = parts[0].layout
        source = EventSource(
            url=self._connection.url,
            families=lambda: store.families,
            parts=len(parts),
            shards=layout.shard_count,
            block_tokens=layout.page_tokens,
            takes_lossy=store.takes_lossy,
            dp_rank=self._replica,
        )
        return publisher_for(source, options)

    def _placed(self, keys: Sequence[str], host_indices: Any) -> tuple[PageStore, list[int]]:
        """Raises LayoutError for slots that are not whole pages, or without a pool."""
        if self._store is None:
            raise kvtier.LayoutError("no host pool is registered", remedy="attach the backend")
        return self._store, page_places(host_indices, self._pool.page_size, len(keys))


def _client_name(config: HiCacheStorageConfig, replica: int) -> str:
    """How `kvtier status` names this process among its clients."""
    ranks = [("tp", config.tp_rank, config.tp_size), ("pp", config.pp_rank, config.pp_size)]
    places = [f"{name} {rank}/{size}" for name, rank, size in ranks if size > 1]
    if replica:
        places.append(f"dp {replica}")
    return " ".join(
        ["sglang", (config.model_name or "")[-_NAME_CHARACTERS_MAX:], *places, f"pid {os.getpid()}"]
    )


def _require_watching(options: Options) -> None:
    """Raises UnsupportedSglang where updates of the weights would go unseen: then pages of the
    weights before would be found under the name of those after.
    """
    if WEIGHTS.is_watching or options.weights_fixed:
        return
    raise UnsupportedSglang(
        "the plugin kvtier is not loaded, so that online updates of the weights would go unseen",
        remedy="install kvtier where SGLang is, and name it in SGLANG_PLUGINS if that is set, or "
        'set "kvtier_weights_fixed": true for a server whose weights are never updated',
    )
