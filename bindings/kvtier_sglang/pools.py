"""A host pool of SGLang as rows of pages, without a byte copied.

`shape_of` reads a pool's attributes and refuses, by name, what cannot be stored page by page;
`rows_of` gives its buffers with the pages along the first dimension. Both look at attributes alone:
SGLang is not loaded, and torch only as whoever made the pool has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier import LayoutError
from kvtier_sglang.layouts import STORAGE_ORDERS, PoolShape

if TYPE_CHECKING:
    import torch

__all__ = ["page_places", "rows_of", "shape_of"]


def shape_of(pool: Any, name: str = "kv") -> PoolShape:
    """What `pool` holds. Raises LayoutError naming what cannot be taken, and what to use."""
    _refuse_others(pool)
    is_latent = hasattr(pool, "kv_cache_dim")
    row_forms = (
        getattr(pool, "storage_format_tag", None) or "",
        "packed-fp8" if getattr(pool, "dsa_kv_cache_store_fp8", False) else "",
    )
    return PoolShape(
        pool=name,
        mem_layout=pool.layout,
        page_tokens=pool.page_size,
        layers=pool.layer_num,
        first_layer=pool.start_layer or 0,
        heads=1 if is_latent else pool.head_num,
        key_dim=pool.kv_cache_dim if is_latent else pool.head_dim,
        # Up to 0.5.21 only pools that have values of another size than keys say so. One without
        # values has another form, which rows_of looks at.
        value_dim=0 if is_latent else getattr(pool, "v_head_dim", pool.head_dim),
        row_form=".".join(filter(None, row_forms)),
    )


def rows_of(pool: Any, shape: PoolShape) -> tuple[torch.Tensor, ...]:
    """The buffers of a page, each as (pages, ...) of the pool in the order of the page's bytes.

    Raises LayoutError if a buffer does not have the form that the pool's layout has.
    """
    if shape.is_latent:
        return (_rows(pool, shape, pool.kv_buffer, shape.key_dim),)
    return (
        _rows(pool, shape, pool.kv_buffer[0], shape.key_dim),
        _rows(pool, shape, pool.kv_buffer[1], shape.value_dim),
    )


def page_places(host_indices: Any, page_tokens: int, count: int) -> list[int]:
    """The pages of the pool that slots lie in, `page_tokens` a page. Raises LayoutError unless they
    are whole pages, `count` of them.
    """
    firsts = host_indices[::page_tokens].tolist()
    steps = host_indices[1:] - host_indices[:-1]
    steps[page_tokens - 1 :: page_tokens] = 1  # from one page to the next
    if (
        len(host_indices) != count * page_tokens
        or any(first % page_tokens for first in firsts)
        or not bool((steps == 1).all())
    ):
        raise LayoutError(
            f"{len(host_indices)} slots for {count} pages of {page_tokens} tokens",
            remedy="pass the slots of whole pages, in the order of their tokens",
        )
    return [first // page_tokens for first in firsts]


def _rows(pool: Any, shape: PoolShape, buffer: Any, dim: int) -> Any:
    layers, page, heads, pages = shape.layers, shape.page_tokens, shape.heads, pool.page_num
    forms = {
        "layer_first": (layers, pages * page, heads, dim),
        "page_first": (pages * page, layers, heads, dim),
        "page_first_direct": (pages, layers, page, heads, dim),
        "page_head": (pages, heads, page, layers, dim),
    }
    if tuple(buffer.shape) != forms[shape.mem_layout] or not buffer.is_contiguous():
        raise LayoutError(
            f"{type(pool).__name__} has a buffer of {tuple(buffer.shape)}, "
            f"{shape.mem_layout} would be {forms[shape.mem_layout]}",
            remedy="use a host pool as SGLang 0.5.23 makes them",
        )
    if shape.mem_layout == "layer_first":
        return buffer.view(layers, pages, page, heads, dim).transpose(0, 1)
    if shape.mem_layout == "page_first":
        return buffer.view(pages, page, layers, heads, dim)
    return buffer


def _refuse_others(pool: Any) -> None:
    kind = type(pool).__name__
    wanted = ["layout", "page_size", "page_num", "layer_num", "start_layer", "dtype", "kv_buffer"]
    if not hasattr(pool, "kv_cache_dim"):
        wanted += ["head_num", "head_dim"]
    missing = [name for name in wanted if not hasattr(pool, name)]
    is_split = getattr(pool, "_native_buffers", None) is not None
    reasons = {
        f"it has no {', '.join(missing)}": bool(missing),
        "it has no buffer of its own (DeepSeek-V4)": getattr(pool, "kv_buffer", None) is None,
        f"--hicache-mem-layout {getattr(pool, 'layout', None)} is not one of "
        f"{', '.join(STORAGE_ORDERS)}": getattr(pool, "layout", None) not in STORAGE_ORDERS,
        "decode context parallelism divides its pages": getattr(pool, "dcp_size", 1) != 1,
        "its pages lie in an envelope": getattr(pool, "stores_page_envelope", False),
        "context parallelism divides its layers": getattr(pool, "_layer_shard_enabled", False),
        "it holds layers of a draft model": not missing
        and getattr(pool, "target_layer_num", pool.layer_num) != pool.layer_num,
        "its MXFP8 scales lie in buffers of their own": hasattr(pool, "k_scale_host"),
        "its rows lie in several buffers": is_split,
    }
    for reason, holds in reasons.items():
        if holds:
            raise LayoutError(
                f"host pool {kind} cannot be stored by kvtier: {reason}",
                remedy="use a model and layout with a plain host pool, or run without "
                "--hicache-storage-backend",
            )
