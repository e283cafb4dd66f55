"""The forward pass of the Llama family: rotary attention over pages, gated MLP, RMS norms.

Llama, SmolLM2, Qwen2 (biases of q, k, v) and Qwen3 (norms of q and k) differ in switches of
ModelConfig alone. The order of roundings is that of transformers' implementation, so that bfloat16
gives its numbers. Weights are never written to: one Llama may serve several engines and threads.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from kvtier_engine.attention.base import Attention, AttentionPass, Batch
from kvtier_engine.model.config import ModelConfig, RopeConfig
from kvtier_engine.model.products import product
from kvtier_engine.model.weights import LayerWeights, Weights

__all__ = ["Llama", "rotary_frequencies"]


class Llama:
    """A network of `config`, with `weights` in one dtype on one device."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        frequencies = rotary_frequencies(config.rope, config.head_dim)
        self._frequencies = frequencies.to(weights.embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """The last hidden states, normed: (rows, hidden). Writes the batch's KV into its pages."""
        hidden = functional.embedding(batch.tokens, self.weights.embedding)
        turns = self._turns(batch.positions)
        attended = attention.prepare(batch)
        for number, layer in enumerate(self.weights.layers):
            if batch.arriving is not None:
                batch.arriving.hold(number)
            normed = _rms_norm(hidden, layer.input_norm, self.config.norm_eps)
            hidden = hidden + self._attention(number, layer, normed, attended, turns)
            normed = _rms_norm(hidden, layer.mlp_norm, self.config.norm_eps)
            hidden = hidden + _mlp(layer, normed)
        return _rms_norm(hidden, self.weights.norm, self.config.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, vocab) in float32, of rows that `forward` returned."""
        return product(hidden, self.weights.head).float()

    def _attention(
        self,
        number: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        attended: AttentionPass,
        turns: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        config = self.config
        rows, heads, kv_heads = len(hidden), config.heads, config.kv_heads
        joined = product(hidden, layer.qkv, layer.qkv_bias)
        parts = joined.view(rows, heads + 2 * kv_heads, config.head_dim)
        query, key, value = torch.split(parts, [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = _rms_norm(query, layer.q_norm, config.norm_eps)
            key = _rms_norm(key, layer.k_norm, config.norm_eps)
        out = attended.attend(number, _turned(query, turns), _turned(key, turns), value)
        return product(out.reshape(rows, -1), layer.output, layer.output_bias)

    def _turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of each row's position, (rows, 1, head_dim), computed in float32."""
        angles = positions.float()[:, None] * self._frequencies[None]
        both = torch.cat((angles, angles), dim=-1)[:, None]
        return both.cos().to(self.dtype), both.sin().to(self.dtype)


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians a position of each pair of dimensions, (head_dim / 2,) in float32.

    With `factor`, as Llama 3.1 stretches them: pairs that turn seldom are slowed by the factor,
    those that turn often are left, and those in between are mixed.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.factor == 1.0:
        return frequencies
    turns = rope.original_context_tokens * frequencies / (2 * math.pi)
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32, rounded before the weight is applied."""
    wide = hidden.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(hidden.dtype)


def _turned(heads: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of (rows, heads, dim); the two of a pair lie half a head apart."""
    cosines, sines = turns
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def _mlp(layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
    gate, up = product(hidden, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return product(functional.silu(gate) * up, layer.down, layer.down_bias)
