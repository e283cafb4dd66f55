"""How many bytes of KV a token of a model costs, over all its layers and all its ranks.

From the models' published configurations. Grouped attention keeps k and v of `heads` heads of `dim`
elements a layer; multi-head latent attention one latent of `dim` and a rotary part of `rope`
elements. fp8 is one byte an element; a rotary part stays in bf16, as engines and kvtier keep it.
Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvtier.bench.errors import BenchInput
from kvtier.core.page import Codec
from kvtier.errors import LayoutError
from kvtier.packing.layout import Layout

__all__ = ["MODELS", "KvDtype", "KvModel", "bytes_per_token", "layout_bytes_per_token"]

_PAGE_TOKENS: Final = 64


class KvDtype(StrEnum):
    BF16 = "bf16"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvModel:
    """`rope` above 0: latent attention, and `heads` is 1. `other`: further bytes a layer, as those
    of a sparse attention's index keys."""

    layers: int
    heads: int = 1
    dim: int
    rope: int = 0
    other: int = 0

    def bytes(self, dtype: KvDtype) -> int:
        """Of one token."""
        each = 1 if dtype is KvDtype.FP8 else 2
        parts = self.dim * each + self.rope * 2 if self.rope else 2 * self.heads * self.dim * each
        return self.layers * (parts + self.other)


_LATENT: Final = {"dim": 512, "rope": 64}
MODELS: Final[dict[str, KvModel]] = {
    "deepseek-v3": KvModel(layers=61, **_LATENT),
    "kimi-k2": KvModel(layers=61, **_LATENT),
    # Its index keys: 128 bytes of fp8 and a scale of 4.
    "glm-5": KvModel(layers=78, other=132, **_LATENT),
    "llama-3.1-8b": KvModel(layers=32, heads=8, dim=128),
    "llama-3.1-70b": KvModel(layers=80, heads=8, dim=128),
    "qwen3-0.6b": KvModel(layers=28, heads=8, dim=128),
    "qwen3-1.7b": KvModel(layers=28, heads=8, dim=128),
    "qwen3-4b": KvModel(layers=36, heads=8, dim=128),
    "qwen3-8b": KvModel(layers=36, heads=8, dim=128),
    "qwen3-14b": KvModel(layers=40, heads=8, dim=128),
    "qwen3-32b": KvModel(layers=64, heads=8, dim=128),
    "qwen3-30b-a3b": KvModel(layers=48, heads=4, dim=128),
    "qwen3-235b-a22b": KvModel(layers=94, heads=4, dim=128),
}


def layout_bytes_per_token(config: dict[str, Any], dtype: KvDtype = KvDtype.BF16) -> int:
    """Of a page as kvtier stores it (without its record's header), of the model that a Hugging Face
    config.json describes; fp8 with the scales of a page of _PAGE_TOKENS. Raises BenchInput."""
    try:
        layout = Layout.from_hf(
            config, revision="any", page_tokens=_PAGE_TOKENS, dtype="bfloat16", model_id="layout"
        )
        codec = Codec.FP8 if dtype is KvDtype.FP8 else Codec.RAW
        return -(-layout.payload_bytes(codec) // _PAGE_TOKENS)
    except LayoutError as error:
        raise BenchInput(f"layout: {error}", remedy=error.remedy) from error


def bytes_per_token(model: str, dtype: KvDtype = KvDtype.BF16) -> int:
    """Raises BenchInput for a model that is not in MODELS."""
    found = MODELS.get(model)
    if found is None:
        raise BenchInput(
            f"model {model!r} is not known",
            remedy=f"one of {', '.join(MODELS)}; or give its size with --bytes-per-token",
        )
    return found.bytes(dtype)
