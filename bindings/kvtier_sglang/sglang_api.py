"""All that the backend takes from SGLang, in one place. Only `plugin` imports it too.

Written for 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_model, get_serving

__all__ = [
    "HiCacheStorage",
    "HiCacheStorageConfig",
    "HiCacheStorageExtraInfo",
    "ServedModel",
    "StorageMetrics",
    "served_model",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the server says of its model; empty where it says nothing.

    `kv_scales` is the file of the FP8 scales, which are part of what the numbers mean.
    """

    path: str
    revision: str
    weight_version: str
    kv_cache_dtype: str
    kv_scales: str


def served_model() -> ServedModel:
    """Of this process's server, as its configuration is now."""
    model, serving = get_model(), get_serving()
    return ServedModel(
        path=_text(model, "model_path"),
        revision=_text(model, "revision"),
        weight_version=_text(serving, "weight_version"),
        kv_cache_dtype=_text(model, "kv_cache_dtype"),
        kv_scales=_text(model, "quantization_param_path"),
    )


def _text(bag: Any, name: str) -> str:
    value = getattr(bag, name, None)
    return "" if value is None else str(value)
