"""As much of SGLang as the backend takes from it, for tests of the backend alone: names and fields
as in 0.5.23. What is proved with it is proved of the binding; that SGLang is like this is proved in
the tests with a real one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["Config", "StandIn", "Transfer", "stand_in"]

_KERNELS = {
    "mamba_backend": "triton",
    "linear_attn_backend": "triton",
    "linear_attn_decode_backend": None,
    "linear_attn_prefill_backend": None,
}


class Storage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None: ...

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None: ...

    def batch_exists(self, keys: Any, extra_info: Any = None) -> Any: ...

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any: ...

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any: ...

    def batch_exists_v2(self, keys: Any, transfers: Any = None, extra: Any = None) -> Any: ...

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> Any: ...

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> Any: ...


@dataclass
class Config:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    model_name: str | None = "m"
    extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Transfer:
    name: str
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: str = "all_pages"


@dataclass
class Result:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StandIn:
    """`backend` is kvtier_sglang.backend with this SGLang; `model` and the like what it says."""

    backend: Any
    api: Any
    model: SimpleNamespace
    serving: SimpleNamespace
    spec: SimpleNamespace
    mamba: SimpleNamespace


@contextmanager
def stand_in(*, without: tuple[str, ...] = ()) -> Iterator[StandIn]:
    """`without` are names that its modules do not have."""
    model = SimpleNamespace(
        model_path="m", revision=None, kv_cache_dtype="auto", quantization_param_path=None
    )
    serving = SimpleNamespace(weight_version="1")
    spec = SimpleNamespace(speculative_draft_model_path=None, speculative_draft_model_revision=None)
    mamba = SimpleNamespace(**_KERNELS)
    given = {
        "mem_cache.hicache_storage": {
            "HiCacheStorage": Storage,
            "HiCacheStorageConfig": Config,
            "HiCacheStorageExtraInfo": SimpleNamespace,
            "PoolTransfer": Transfer,
            "PoolTransferResult": Result,
        },
        "observability.metrics_collector": {"StorageMetrics": SimpleNamespace},
        "runtime_context": {
            "get_model": lambda: model,
            "get_serving": lambda: serving,
            "get_spec": lambda: spec,
            "get_exec": lambda: SimpleNamespace(mamba=mamba),
        },
    }
    names = ["sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.observability"]
    modules = {name: ModuleType(name) for name in names}
    for name, members in given.items():
        made = ModuleType(f"sglang.srt.{name}")
        for member, value in members.items():
            if member not in without:
                setattr(made, member, value)
        modules[made.__name__] = made
    ours = ["kvtier_sglang.backend", "kvtier_sglang.sglang_api", "kvtier_sglang.misses"]
    for name in ours:
        sys.modules.pop(name, None)
    sys.modules.update(modules)
    try:
        yield StandIn(
            backend=importlib.import_module(ours[0]),
            api=importlib.import_module(ours[1]),
            model=model,
            serving=serving,
            spec=spec,
            mamba=mamba,
        )
    finally:
        for name in (*modules, *ours):
            sys.modules.pop(name, None)
