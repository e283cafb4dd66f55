"""Host pools as SGLang 0.5.23 makes them, as far as the binding looks at them: attributes alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kvtier_sglang.layouts import Identity, Ranks, part_layouts
from kvtier_sglang.options import Options
from kvtier_sglang.pools import rows_of, shape_of
from kvtier_sglang.store import PageStore

__all__ = [
    "IDENTITY",
    "LAYERS",
    "PAGE",
    "PAGES",
    "hashes",
    "index_pool",
    "latent_pool",
    "pool_with_heads",
    "slots_of",
    "states_pool",
    "store_for",
]

LAYERS, PAGE, PAGES, HEADS = 3, 4, 8, 2
IDENTITY = Identity(model_id="m", weights_revision="r1", kv_format="bfloat16")


def pool_with_heads(
    mem_layout: str, *, seed: int = 0, dim: int = 16, v_dim: int = 16, pages: int = PAGES
) -> Any:
    """K and V, random for a seed. Equal sizes lie in one tensor, others in two, as there."""
    forms = {
        "layer_first": lambda d: (LAYERS, pages * PAGE, HEADS, d),
        "page_first": lambda d: (pages * PAGE, LAYERS, HEADS, d),
        "page_first_direct": lambda d: (pages, LAYERS, PAGE, HEADS, d),
        "page_head": lambda d: (pages, HEADS, PAGE, LAYERS, d),
    }
    form = forms[mem_layout]
    if dim == v_dim:
        buffer: Any = _random((2, *form(dim)), seed)
    else:
        buffer = (_random(form(dim), seed), _random(form(v_dim), seed + 1))
    return _pool(mem_layout, buffer, pages, head_num=HEADS, head_dim=dim, v_head_dim=v_dim)


def latent_pool(mem_layout: str, *, seed: int = 0, dim: int = 80) -> Any:
    forms = {
        "layer_first": (LAYERS, PAGES * PAGE, 1, dim),
        "page_first": (PAGES * PAGE, LAYERS, 1, dim),
        "page_first_direct": (PAGES, LAYERS, PAGE, 1, dim),
    }
    return _pool(mem_layout, _random(forms[mem_layout], seed), PAGES, kv_cache_dim=dim)


def states_pool(*, seed: int = 0, layers: int = LAYERS, conv: tuple[int, ...] = (6, 3)) -> Any:
    """Of linear attention: a slot a page."""
    temporal = _random((PAGES, layers, 1, 2, 4, 4), seed).to(torch.float32)
    convolved = [_random((PAGES, layers, 1, *conv), seed + 1)]
    return SimpleNamespace(
        layout="page_first_direct",
        page_size=1,
        page_num=PAGES,
        num_mamba_layers=layers,
        dtype=torch.bfloat16,
        temporal_buffer=temporal,
        conv_buffer=convolved,
        slot_state_buffers=[_random((PAGES, 5), seed + 2)],
        kv_buffer=[temporal, *convolved],
    )


def index_pool(mem_layout: str, *, seed: int = 0, stride: int = 24) -> Any:
    """Of an indexer: bytes, a row a page and layer."""
    form = (LAYERS, PAGES, stride) if mem_layout == "layer_first" else (PAGES, LAYERS, 1, stride)
    made = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        layout=mem_layout,
        page_size=PAGE,
        page_num=PAGES,
        layer_num=LAYERS,
        target_layer_num=LAYERS,
        dtype=torch.uint8,
        index_k_with_scale_buffer=torch.randint(0, 256, form, generator=made, dtype=torch.uint8),
        device_pool=SimpleNamespace(index_head_dim=16, quant_block_size=16),
    )


def store_for(
    connection: Any,
    pool: Any,
    *,
    ranks: Ranks | None = None,
    identity: Identity = IDENTITY,
    **options: Any,
) -> PageStore:
    shape = shape_of(pool)
    parts = part_layouts(shape, identity, ranks or Ranks())
    return PageStore(connection, parts, rows_of(pool, shape), Options(**options))


def hashes(count: int, prompt: int = 0) -> list[str]:
    """Page hashes as SGLang has them: 64 hexadecimal digits."""
    return [f"{prompt:032x}{number:032x}" for number in range(count)]


def slots_of(places: list[int]) -> torch.Tensor:
    """The token slots of pages, as SGLang passes them."""
    return torch.cat([torch.arange(place * PAGE, (place + 1) * PAGE) for place in places])


def _pool(mem_layout: str, buffer: Any, pages: int, **more: Any) -> Any:
    return SimpleNamespace(
        layout=mem_layout,
        page_size=PAGE,
        page_num=pages,
        layer_num=LAYERS,
        target_layer_num=LAYERS,
        start_layer=0,
        end_layer=LAYERS,
        dtype=torch.bfloat16,
        kv_buffer=buffer,
        **more,
    )


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made).to(torch.bfloat16)
