"""The KV cache of a transformers model as kvtier pages, and back; no bit is changed either way.

A page holds `page_tokens` tokens of every layer in the order of kvtier's "LTHD" layouts: for k,
then for v, the layers one after another, each as (tokens, heads, dim). transformers keeps (batch,
heads, tokens, dim) a layer.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache

from kvtier_engine.errors import ModelUnusable

__all__ = ["cache_from_pages", "pages_from_cache"]


def pages_from_cache(cache: DynamicCache, *, page_tokens: int, first: int = 0) -> torch.Tensor:
    """The full pages of `cache` from page `first` on.

    One contiguous tensor of shape (pages, 2, layers, page_tokens, heads, dim). Tokens after the
    last full page are left out. The cache must hold one sequence, and every layer all of it (no
    sliding window); ModelUnusable says so otherwise.
    """
    layers = cache.layers
    shapes = {tuple(part.shape) for layer in layers for part in (layer.keys, layer.values)}
    if len(shapes) != 1 or next(iter(shapes))[0] != 1 or any(layer.is_sliding for layer in layers):
        raise ModelUnusable(
            f"a cache of shapes {sorted(shapes)}: one sequence and equal layers are needed",
            remedy="use a model with full attention in every layer, and a batch of one",
        )
    ((_, heads, tokens, dim),) = shapes
    pages = max(0, tokens // page_tokens - first)
    kept = slice(first * page_tokens, (first + pages) * page_tokens)
    shape = (pages, 2, len(layers), page_tokens, heads, dim)
    out = torch.empty(shape, dtype=layers[0].keys.dtype, device=layers[0].keys.device)
    for number, layer in enumerate(layers):
        for part, whole in enumerate((layer.keys, layer.values)):
            by_token = whole[0, :, kept].transpose(0, 1)
            out[:, part, number] = by_token.reshape(pages, page_tokens, heads, dim)
    return out


def cache_from_pages(pages: torch.Tensor) -> DynamicCache:
    """A cache that holds these pages (as made by `pages_from_cache`) and no token more; a copy."""
    count, _, layers, page_tokens, heads, dim = pages.shape
    cache = DynamicCache()
    if count == 0:
        return cache
    for number in range(layers):
        parts = pages[:, :, number].transpose(0, 1).reshape(2, count * page_tokens, heads, dim)
        keys, values = parts.transpose(1, 2).unsqueeze(1).contiguous()
        cache.update(keys, values, number)
    return cache
