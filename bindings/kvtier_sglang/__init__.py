"""kvtier as a storage backend of SGLang's HiCache.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvtier", "module_path": "kvtier_sglang",
      "class_name": "KvTierHiCacheStorage", "interface_v1": 1}'

Importing this package does not load SGLang; naming the class does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_sglang.backend import KvTierHiCacheStorage

__all__ = ["KvTierHiCacheStorage"]


def __getattr__(name: str) -> Any:
    if name != "KvTierHiCacheStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("kvtier_sglang.backend").KvTierHiCacheStorage
