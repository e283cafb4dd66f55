"""What a network is: read once from a Hugging Face config.json, then a frozen value.

A setting that this engine does not compute is refused by name (ModelUnusable), never left out. No
transformers: importing it takes seconds. Values, usable from any thread.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_engine.errors import ModelUnusable

__all__ = ["Architecture", "ModelConfig", "RopeConfig"]

_REMEDY = "use a Llama, SmolLM2, Qwen2 or Qwen3 model with full attention in every layer"


class Architecture(enum.Enum):
    """The value is what config.json calls `model_type`."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: `theta`, and Llama 3's stretching where `factor` is not 1."""

    theta: float
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_tokens: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one network. `hf` is the config as it was read, for kvtier's Layout."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    norm_eps: float
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    end_ids: frozenset[int]
    hf: Mapping[str, Any]

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """From the objects of config.json and generation_config.json. Raises ModelUnusable."""
        try:
            return cls._read(config, generation or {})
        except (AttributeError, TypeError, ValueError) as error:
            raise ModelUnusable(
                f"config: a setting is of another kind than Hugging Face writes it: {error}",
                remedy=_REMEDY,
            ) from error

    @classmethod
    def _read(cls, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        architecture = _architecture(config)
        _refuse_unknown(config)
        heads = _count(config, "num_attention_heads")
        kv_heads = _count(config, "num_key_value_heads", heads)
        hidden = _count(config, "hidden_size")
        head_dim = _count(config, "head_dim", hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise ModelUnusable(
                f"config: {heads} heads, {kv_heads} key heads of size {head_dim}", remedy=_REMEDY
            )
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=_count(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_count(config, "intermediate_size"),
            layers=_count(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            context_tokens=_count(config, "max_position_embeddings"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or architecture is Architecture.QWEN2,
            output_bias=attention_bias and architecture is not Architecture.QWEN2,
            mlp_bias=bool(config.get("mlp_bias", False)) and architecture is Architecture.LLAMA,
            qk_norm=architecture is Architecture.QWEN3,
            end_ids=_end_ids(config) | _end_ids(generation),
            hf=dict(config),
        )


def _architecture(config: Mapping[str, Any]) -> Architecture:
    named = config.get("model_type")
    try:
        return Architecture(named)
    except ValueError:
        raise ModelUnusable(
            f"config: model_type is {named!r}, this engine computes "
            + ", ".join(kind.value for kind in Architecture),
            remedy=_REMEDY,
        ) from None


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    refused = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "layer_types": bool(kinds),
        "quantization_config": bool(config.get("quantization_config")),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for name in (name for name, found in refused.items() if found):
        raise ModelUnusable(f"config: {name} is {config[name]!r}", remedy=_REMEDY)


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "llama3":
        raise ModelUnusable(f"config: rope_type is {kind!r}", remedy=_REMEDY)
    try:
        return RopeConfig(
            theta=theta,
            factor=float(given["factor"]),
            low_frequency_factor=float(given["low_freq_factor"]),
            high_frequency_factor=float(given["high_freq_factor"]),
            original_context_tokens=int(given["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ModelUnusable(f"config: rope settings without {error}", remedy=_REMEDY) from error


def _end_ids(config: Mapping[str, Any]) -> frozenset[int]:
    given = config.get("eos_token_id")
    return frozenset(given if isinstance(given, list) else [] if given is None else [given])


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelUnusable(f"config: {name} is {value!r}", remedy=_REMEDY)
    return value
