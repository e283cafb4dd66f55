"""All that the backend takes from SGLang, in one place. Only `plugin` imports it too.

Written for 0.5.23, read against 0.5.20 to 0.5.22. What is needed is looked for by name when a
backend is made: an SGLang without it is refused, and says what it lacks. Nothing is assumed of a
setting that is not there, for each is part of what pages mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from kvtier_sglang.errors import UnsupportedSglang

_REMEDY: Final = "use SGLang 0.5.20 to 0.5.23, or run without --hicache-storage-backend"


def _version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "of unknown version"


try:
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.observability.metrics_collector import StorageMetrics
    from sglang.srt.runtime_context import (
        get_exec,
        get_model,
        get_parallel,
        get_serving,
        get_spec,
    )
except ImportError as error:
    raise UnsupportedSglang(f"SGLang {_version()}: {error}", remedy=_REMEDY) from error

__all__ = [
    "HiCacheStorage",
    "HiCacheStorageConfig",
    "HiCacheStorageExtraInfo",
    "PoolTransfer",
    "PoolTransferResult",
    "ServedModel",
    "StorageMetrics",
    "draft_model",
    "replica_of",
    "require_sglang",
    "served_model",
    "state_kernels",
    "transfer_result",
]

_METHODS: Final = ("register_mem_pool_host", "register_mem_host_pool_v2", "batch_exists",
                   "batch_get_v1", "batch_set_v1", "batch_exists_v2", "batch_get_v2",
                   "batch_set_v2")  # fmt: skip
_CONFIG: Final = ("tp_rank", "tp_size", "pp_rank", "pp_size", "is_mla_model",
                  "enable_storage_metrics", "model_name", "extra_config")  # fmt: skip
_TRANSFER: Final = ("name", "keys", "host_indices", "hit_policy")
#: Of what makes other numbers of the weights while they are loaded.
_QUANTIZED: Final = ("quantization", "modelopt_quant", "modelopt_checkpoint_restore_path",
                     "rl_quant_profile")  # fmt: skip
_DRAFT: Final = ("speculative_draft_model_path", "speculative_draft_model_revision",
                 "speculative_draft_model_quantization")  # fmt: skip
_KERNELS: Final = ("mamba_backend", "linear_attn_backend", "linear_attn_decode_backend",
                   "linear_attn_prefill_backend")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the server says of its model; empty where it says nothing.

    `kv_scales` is the file of the FP8 scales, which are part of what the numbers mean; `overrides`
    are settings, in JSON, that replace those of the model's own configuration; `quantization` names
    what is made of the weights while they are loaded, in the format `load_format`.
    """

    path: str
    revision: str
    weight_version: str
    kv_cache_dtype: str
    kv_scales: str
    overrides: str
    quantization: str
    load_format: str


def require_sglang() -> None:
    """Raises UnsupportedSglang naming what this version lacks."""
    looked_at = [(HiCacheStorage, name) for name in _METHODS]
    missing = [f"{kind.__name__}.{name}" for kind, name in looked_at if not hasattr(kind, name)]
    for kind, names in ((HiCacheStorageConfig, _CONFIG), (PoolTransfer, _TRANSFER)):
        known = {field.name for field in fields(kind)}
        missing += [f"{kind.__name__}.{name}" for name in names if name not in known]
    if missing:
        raise UnsupportedSglang(f"SGLang {_version()} has no {', '.join(missing)}", remedy=_REMEDY)


def served_model() -> ServedModel:
    """Of this process's server, as its configuration is now. Raises UnsupportedSglang."""
    model, serving = get_model(), get_serving()
    return ServedModel(
        path=_text(model, "model_path"),
        revision=_text(model, "revision"),
        weight_version=_text(serving, "weight_version"),
        kv_cache_dtype=_text(model, "kv_cache_dtype"),
        kv_scales=_text(model, "quantization_param_path"),
        overrides=_text(model, "json_model_override_args"),
        quantization=", ".join(
            _named(model, _QUANTIZED) + _named(get_exec().moe, ("kt_weight_path",))
        ),
        load_format=_text(model, "load_format"),
    )


def draft_model() -> str:
    """Which model drafts; empty where it is a part of the served one. Raises UnsupportedSglang."""
    return " ".join(filter(None, (_text(get_spec(), name) for name in _DRAFT)))


def replica_of(config: HiCacheStorageConfig) -> int:
    """Which data parallel replica this process belongs to: of attention, as its config says, or of
    the whole server, whose replicas all say 0 there. No part of what pages mean.
    """
    of_attention: int = getattr(config, "dp_rank", 0)
    try:
        parallel = get_parallel()
        of_server = parallel.dp_rank if parallel.attn_dp_size == 1 else None
    except (AttributeError, RuntimeError, ValueError):  # older, or outside of a server
        return of_attention
    return of_attention or of_server or 0


def state_kernels() -> str:
    """What computes the states of linear attention: kernels differ in how they lay them out.
    Raises UnsupportedSglang.
    """
    return " ".join(_text(get_exec().mamba, name) or "-" for name in _KERNELS)


def transfer_result(pages: int, by_pool: Mapping[Any, int], lengths: list[int]) -> Any:
    """A PoolTransferResult. Up to 0.5.22 it has no place for all lengths that can be restored; what
    ranks then agree on may be none, and is a miss when it is read.
    """
    result = PoolTransferResult(kv_hit_pages=pages, extra_pool_hit_pages=dict(by_pool))
    if hasattr(result, "restorable_prefix_pages"):
        result.restorable_prefix_pages = lengths
    return result


def _text(bag: Any, name: str) -> str:
    if not hasattr(bag, name):
        raise UnsupportedSglang(f"SGLang {_version()} has no setting {name}", remedy=_REMEDY)
    value = getattr(bag, name)
    return "" if value is None else str(value)


def _named(bag: Any, names: tuple[str, ...]) -> list[str]:
    """Those that say something, each with its name."""
    said = ((name, _text(bag, name)) for name in names)
    return [f"{name} {value}" for name, value in said if value]
