"""Weights by name, and how a network is put together from them.

Every tensor of a file is expected and every expected tensor is there, in its shape, or the model is
refused (ModelUnusable). Projections that read the same rows are joined into one matrix when they
are loaded (q, k, v; gate, up). A tensor-parallel shard would cut the joined rows here, and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvtier_engine.errors import ModelUnusable
from kvtier_engine.model.config import ModelConfig
from kvtier_engine.model.products import lying_well

__all__ = ["LayerWeights", "Weights", "read_safetensors", "shapes_of"]

_REMEDY = "use the complete checkpoint of the model that config.json describes"
#: Files hold these beside the weights now and then; they are computed from the config.
_COMPUTED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One block. Matrices are (out, in), as torch's linear takes them, and lie as `lying_well` has
    it; None where there is none.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Weights:
        """Raises ModelUnusable for missing, unexpected or misshapen tensors, naming the first."""
        shapes = shapes_of(config)
        _check(shapes, tensors, tied=config.tied)
        taken = _Taken(tensors, dtype=dtype, device=device)
        embedding = taken.matrix("model.embed_tokens")
        return cls(
            embedding=embedding,
            layers=tuple(_layer(config, taken, number) for number in range(config.layers)),
            norm=taken.one("model.norm.weight"),
            head=embedding if config.tied else taken.matrix("lm_head"),
        )

    @property
    def nbytes(self) -> int:
        """Of all matrices and vectors, a tied head not twice."""
        parts = [self.embedding, self.norm]
        parts += [] if self.head is self.embedding else [self.head]
        for layer in self.layers:
            parts += [
                one for field in fields(layer) if (one := getattr(layer, field.name)) is not None
            ]
        return sum(part.nbytes for part in parts)


def read_safetensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every *.safetensors file there, as stored. Raises ModelUnusable."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelUnusable(f"{directory} holds no *.safetensors", remedy=_REMEDY)
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as opened:
                names = list(opened.keys())
                found |= {name: opened.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise ModelUnusable(f"{file.name} cannot be read: {error}", remedy=_REMEDY) from error
    return found


class _Taken:
    """Tensors by name, in the dtype and on the device that were asked for."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tensors = tensors
        self._dtype, self._device = dtype, device

    def one(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(device=self._device, dtype=self._dtype)

    def matrix(self, name: str) -> torch.Tensor:
        return lying_well(self.one(f"{name}.weight"))

    def matrices(self, prefix: str, names: Iterable[str]) -> torch.Tensor:
        return lying_well(self.joined(prefix, names, "weight"))

    def joined(self, prefix: str, names: Iterable[str], kind: str) -> torch.Tensor:
        return torch.cat([self.one(f"{prefix}.{name}.{kind}") for name in names])


def _layer(config: ModelConfig, taken: _Taken, number: int) -> LayerWeights:
    base = f"model.layers.{number}"
    attention, mlp = f"{base}.self_attn", f"{base}.mlp"
    qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    return LayerWeights(
        input_norm=taken.one(f"{base}.input_layernorm.weight"),
        qkv=taken.matrices(attention, qkv),
        qkv_bias=taken.joined(attention, qkv, "bias") if config.qkv_bias else None,
        q_norm=taken.one(f"{attention}.q_norm.weight") if config.qk_norm else None,
        k_norm=taken.one(f"{attention}.k_norm.weight") if config.qk_norm else None,
        output=taken.matrix(f"{attention}.o_proj"),
        output_bias=taken.one(f"{attention}.o_proj.bias") if config.output_bias else None,
        mlp_norm=taken.one(f"{base}.post_attention_layernorm.weight"),
        gate_up=taken.matrices(mlp, gate_up),
        gate_up_bias=taken.joined(mlp, gate_up, "bias") if config.mlp_bias else None,
        down=taken.matrix(f"{mlp}.down_proj"),
        down_bias=taken.one(f"{mlp}.down_proj.bias") if config.mlp_bias else None,
    )


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the network needs."""
    hidden, middle = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    outside: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        outside["lm_head.weight"] = (config.vocab_size, hidden)
    matrices = {
        "self_attn.q_proj": ((query, hidden), config.qkv_bias),
        "self_attn.k_proj": ((key, hidden), config.qkv_bias),
        "self_attn.v_proj": ((key, hidden), config.qkv_bias),
        "self_attn.o_proj": ((hidden, query), config.output_bias),
        "mlp.gate_proj": ((middle, hidden), config.mlp_bias),
        "mlp.up_proj": ((middle, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, middle), config.mlp_bias),
    }
    inside: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (shape, has_bias) in matrices.items():
        inside[f"{name}.weight"] = shape
        if has_bias:
            inside[f"{name}.bias"] = shape[:1]
    if config.qk_norm:
        inside |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    layers = {
        f"model.layers.{number}.{name}": shape
        for number in range(config.layers)
        for name, shape in inside.items()
    }
    return outside | layers


def _check(
    shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor], *, tied: bool
) -> None:
    missing = sorted(set(shapes) - set(tensors))
    # A tied head is written by some savers; it is the embedding once more.
    tolerated = {"lm_head.weight"} if tied else set()
    extra = [
        name
        for name in sorted(set(tensors) - set(shapes) - tolerated)
        if not name.endswith(_COMPUTED)
    ]
    wrong = [
        f"{name} {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in sorted(shapes.items())
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    for what, names in (("missing", missing), ("unexpected", extra), ("of wrong shape", wrong)):
        if names:
            raise ModelUnusable(
                f"{len(names)} tensors {what}, the first is {names[0]}", remedy=_REMEDY
            )
