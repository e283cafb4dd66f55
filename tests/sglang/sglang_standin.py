"""SGLang's own storage classes, and of the rest as much as the backend takes, for tests of the
backend alone.

Real is what `sglang.srt.mem_cache.hicache_storage` and the modules around it have: base class,
configuration, transfers, factory, fault injector, file backend, shared memory. They come from the
wheel, which kvtier's environment has without what it asks for (`make test` installs it so), and
need torch alone. The settings of a server are stand-ins, with names as in 0.5.23; that they are
like this is proved in the tests with a whole SGLang.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

__all__ = ["StandIn", "config", "needs_wheel", "stand_in", "transfer"]

_KERNELS = {
    "mamba_backend": "triton",
    "linear_attn_backend": "triton",
    "linear_attn_decode_backend": None,
    "linear_attn_prefill_backend": None,
}
_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_OURS = (
    "kvtier_sglang.backend",
    "kvtier_sglang.sglang_api",
    "kvtier_sglang.misses",
)
#: Of SGLang's modules those that were loaded: once a process, for all tests.
_LOADED: dict[str, ModuleType] = {}


def _wheel() -> str | None:
    try:
        return str(distribution("sglang").locate_file("sglang"))
    except PackageNotFoundError:
        return None


needs_wheel = pytest.mark.skipif(
    _wheel() is None, reason="needs the wheel of SGLang: pip install --no-deps sglang==0.5.23"
)


@dataclass
class StandIn:
    """`backend` is kvtier_sglang.backend with this SGLang, `storage` SGLang's own module; `model`
    and the like are what its server says.
    """

    backend: Any
    api: Any
    storage: Any
    model: SimpleNamespace
    serving: SimpleNamespace
    spec: SimpleNamespace
    mamba: SimpleNamespace
    moe: SimpleNamespace
    parallel: SimpleNamespace

    def module(self, name: str) -> Any:
        """Another of SGLang's own."""
        return importlib.import_module(f"sglang.srt.{name}")


def config(**changes: Any) -> Any:
    """A HiCacheStorageConfig of one rank. Here and below: within `stand_in`."""
    given = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "m",
    }
    return importlib.import_module(_STORAGE).HiCacheStorageConfig(**given | changes)


def transfer(name: str, *, hit_policy: str = "all_pages", **fields: Any) -> Any:
    """A PoolTransfer."""
    storage = importlib.import_module(_STORAGE)
    policy = storage.PoolHitPolicy(hit_policy)
    return storage.PoolTransfer(name=storage.PoolName(name), hit_policy=policy, **fields)


@contextmanager
def stand_in(*, without: tuple[str, ...] = ()) -> Iterator[StandIn]:
    """`without` are names that its modules do not have."""
    model = SimpleNamespace(
        model_path="m",
        revision=None,
        kv_cache_dtype="auto",
        quantization_param_path=None,
        json_model_override_args="{}",
        quantization=None,
        modelopt_quant=None,
        modelopt_checkpoint_restore_path=None,
        rl_quant_profile=None,
        load_format="auto",
    )
    serving = SimpleNamespace(weight_version="1")
    spec = SimpleNamespace(
        speculative_draft_model_path=None,
        speculative_draft_model_revision=None,
        speculative_draft_model_quantization=None,
    )
    mamba, moe = SimpleNamespace(**_KERNELS), SimpleNamespace(kt_weight_path=None)
    parallel = SimpleNamespace(attn_dp_size=1, dp_rank=None)
    given = {
        "observability.metrics_collector": {"StorageMetrics": SimpleNamespace},
        "runtime_context": {
            "get_model": lambda: model,
            "get_serving": lambda: serving,
            "get_spec": lambda: spec,
            "get_exec": lambda: SimpleNamespace(mamba=mamba, moe=moe),
            "get_parallel": lambda: parallel,
        },
        # Of the file backend, for numbers in its log.
        "utils": {},
        "utils.common": {"human_readable_int": str},
    }
    made = {"sglang": ModuleType("sglang")}
    made["sglang"].__path__ = [_wheel()]
    for name, members in given.items():
        module = made[f"sglang.srt.{name}"] = ModuleType(f"sglang.srt.{name}")
        for member, value in members.items():
            if member not in without:
                setattr(module, member, value)
    made["sglang.srt.utils"].__path__ = []
    for name in _OURS:
        sys.modules.pop(name, None)
    sys.modules.update(_LOADED | made)
    storage = importlib.import_module(_STORAGE)
    taken = {name: storage.__dict__.pop(name) for name in without if hasattr(storage, name)}
    try:
        yield StandIn(
            backend=importlib.import_module(_OURS[0]),
            api=importlib.import_module(_OURS[1]),
            storage=storage,
            model=model,
            serving=serving,
            spec=spec,
            mamba=mamba,
            moe=moe,
            parallel=parallel,
        )
    finally:
        storage.__dict__.update(taken)
        for name in list(sys.modules):
            if name in _OURS or name == "sglang" or name.startswith("sglang."):
                module = sys.modules.pop(name)
                if name not in _OURS and name not in made:
                    _LOADED[name] = module
