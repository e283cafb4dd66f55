"""Reading a Hugging Face config: which segments its KV cache has, and its rotary settings as text.

The config may be the object that transformers makes or the dict of a config.json, of transformers 4
or 5; both give the same result. A config whose cache has other parts (recurrent states, shared
layers, sparse index keys) is refused: a page without them would be found and be useless.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier.errors import LayoutError
from kvtier.packing.segments import Role, ScaleRule, Segment

__all__ = ["HfModel", "latent_segments", "read_hf_config"]

_PACKABLE: Final = frozenset({"bfloat16", "float16", "float32"})
_FULL_CACHE_LAYERS: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
#: Settings whose presence means that pages of K and V (or latent and rope) are not all of the
#: cache.
_OTHER_STATE: Final = (
    "num_kv_shared_layers",
    "index_head_dim",
    "global_head_dim",
    "is_encoder_decoder",
    "mamba_d_state",
    "ssm_state_size",
    "linear_num_key_heads",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HfModel:
    """What a config says about KV pages. `rope` is canonical: equal settings give equal text."""

    model_id: str
    segments: tuple[Segment, ...]
    rope: str


def read_hf_config(config: object, dtype: str) -> HfModel:
    """Raises LayoutError, naming the setting, if the cache is not plain K and V or latent
    attention.
    """
    model_id = _get(config, "_name_or_path") or _get(config, "name_or_path") or ""
    text = config
    if _get(config, "num_hidden_layers") is None and _get(config, "text_config") is not None:
        text = _get(config, "text_config")
    _refuse_other_state(text)
    layers = _count(text, "num_hidden_layers")
    if _get(text, "kv_lora_rank") is not None:
        segments = latent_segments(
            layers, _count(text, "kv_lora_rank"), _count(text, "qk_rope_head_dim"), dtype
        )
    else:
        segments = _key_value_segments(text, layers, dtype)
    return HfModel(model_id=str(model_id), segments=segments, rope=_rope_text(text))


def latent_segments(
    layers: int, kv_lora_rank: int, qk_rope_head_dim: int, dtype: str
) -> tuple[Segment, ...]:
    """The two segments of multi-head latent attention, one head each; rope is never packed."""
    latent = Segment(
        name="latent",
        role=Role.LATENT,
        dtype=dtype,
        layers=layers,
        heads=1,
        dim=kv_lora_rank,
        scale_rule=_scale_rule(dtype),
    )
    rope = Segment(
        name="rope",
        role=Role.ROPE,
        dtype=dtype,
        layers=layers,
        heads=1,
        dim=qk_rope_head_dim,
        scale_rule=ScaleRule.NONE,
    )
    return latent, rope


def _key_value_segments(config: object, layers: int, dtype: str) -> tuple[Segment, ...]:
    kv_heads = "num_key_value_heads"
    heads = _count(
        config, kv_heads if _get(config, kv_heads) is not None else "num_attention_heads"
    )
    dim = _head_dim(config)
    value_dim = _count(config, "v_head_dim") if _get(config, "v_head_dim") is not None else dim
    key, value = (
        Segment(
            name=name,
            role=role,
            dtype=dtype,
            layers=layers,
            heads=heads,
            dim=segment_dim,
            scale_rule=_scale_rule(dtype),
        )
        for name, role, segment_dim in (("k", Role.KEY, dim), ("v", Role.VALUE, value_dim))
    )
    return key, value


def _head_dim(config: object) -> int:
    if _get(config, "head_dim") is not None:
        return _count(config, "head_dim")
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    if hidden % heads:
        raise LayoutError(
            f"config: hidden_size {hidden} is no multiple of num_attention_heads {heads}",
            remedy="set head_dim in the config, or describe the cache with Layout.from_segments",
        )
    return hidden // heads


def _refuse_other_state(config: object) -> None:
    remedy = "describe the whole cache with Layout.from_segments"
    for field in _OTHER_STATE:
        if _get(config, field):
            raise LayoutError(
                f"config: {field} is {_get(config, field)!r}: the cache holds more than K and V of "
                "every layer",
                remedy=remedy,
            )
    kinds = set(_get(config, "layer_types") or ()) - _FULL_CACHE_LAYERS
    if kinds:
        raise LayoutError(
            f"config: layer_types has {', '.join(sorted(map(str, kinds)))}", remedy=remedy
        )


def _rope_text(config: object) -> str:
    """The rotary settings as JSON with sorted keys, "" for a model without any."""
    given = _get(config, "rope_parameters") or _get(config, "rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise LayoutError(
            f"config: rope settings are {given!r}", remedy="pass them as a mapping, or None"
        )
    per_kind = {k: v for k, v in given.items() if isinstance(v, Mapping)}
    if per_kind:
        settings: dict[str, Any] = {k: _one_rope(config, v) for k, v in per_kind.items()}
    else:
        settings = _one_rope(config, given)
    return json.dumps(settings, sort_keys=True, separators=(",", ":")) if settings else ""


def _one_rope(config: object, given: Mapping[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in given.items() if value is not None}
    for field in ("rope_theta", "rope_local_base_freq", "partial_rotary_factor"):
        if settings.get(field) is None and _get(config, field) is not None:
            settings[field] = _get(config, field)
    if not settings:
        return {}
    kind = settings.pop("type", None)
    settings.setdefault("rope_type", kind or "default")
    if settings.get("partial_rotary_factor") == 1.0:
        del settings["partial_rotary_factor"]
    if settings["rope_type"] != "default":
        # Scaled kinds derive their frequencies from it, so an engine's longer context is another
        # family.
        settings["max_position_embeddings"] = _get(config, "max_position_embeddings")
    return {key: _plain(value) for key, value in settings.items()}


def _plain(value: object) -> object:
    """One form for equal numbers: 10000 and 10000.0 are the same setting."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise LayoutError(
        f"config: rope setting {value!r} is neither a number, text nor a list of them",
        remedy="pass plain rope settings",
    )


def _scale_rule(dtype: str) -> ScaleRule:
    return ScaleRule.LAYER_HEAD if dtype in _PACKABLE else ScaleRule.NONE


def _count(config: object, field: str) -> int:
    value = _get(config, field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(
            f"config: {field} is {value!r}",
            remedy=f"from_hf needs one whole number for {field}; describe other caches with "
            "Layout.from_segments",
        )
    return value


def _get(config: object, field: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(field)
    return getattr(config, field, None)
