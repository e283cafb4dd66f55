"""From a host pool of SGLang to kvtier's layouts: what a page of it is, and which pages it may be
exchanged for.

A page of a pool is stored as one object for each buffer that it lies in: K and V of a model with
heads, the one row of latent attention. Each is contiguous in the pools whose layout has pages
first, so that it is copied straight to its place. The objects of a page are families of their own
with the same keys; a page is there when all of them are.

The family holds everything that changes what the bytes mean: model, weights, number format, page
size, storage order, layers, heads, the form of a row. Two servers that differ in any of these never
meet; servers that agree do, also where one has its pool layer by layer and the other page by page.

Pure functions of values; nothing of SGLang or torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtier import Layout, LayoutError, Role, ScaleRule, Segment, Shard

__all__ = ["Identity", "PartLayout", "PoolShape", "Ranks", "number_format", "part_layouts"]

#: --hicache-mem-layout -> the order of a page's bytes: layer, token, head, dim.
STORAGE_ORDERS: Final = {
    "layer_first": "LTHD",
    "page_first_direct": "LTHD",
    "page_first": "TLHD",
    "page_head": "HTLD",
}
#: What SGLang calls the formats of --kv-cache-dtype.
_FORMATS: Final = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
_POOL_FORMATS: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1,
                        "float8_e5m2": 1}  # fmt: skip
_SCALED: Final = frozenset({"bfloat16", "float16", "float32"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which model made the pages. `kv_format` is a name that kvtier.Segment takes, and so is
    `kv_compute`, the format of the KV that attention read meanwhile: the same where it is empty.
    """

    model_id: str
    weights_revision: str
    kv_format: str
    kv_compute: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The place of this process. `model_layers` is 0 where nobody said how many there are."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    model_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """One host pool. `heads` are those of this rank, `layers` the pool's, `first_layer` where they
    begin in the model. `key_dim` and `value_dim` are numbers a head; a pool of latent attention has
    one head of `key_dim` and a `value_dim` of 0, held whole by every tensor parallel rank.
    `row_form` names a form of the rows that the other fields do not tell, empty for plain numbers.
    """

    pool: str
    mem_layout: str
    page_tokens: int
    layers: int
    first_layer: int
    heads: int
    key_dim: int
    value_dim: int
    row_form: str = ""

    @property
    def is_latent(self) -> bool:
        return self.value_dim == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayout:
    """One of a page's objects: its number among the pool's buffers, and what it is to kvtier."""

    buffer: int
    layout: Layout


def number_format(stated: str, pool_format: str, itemsize: int) -> str:
    """The format of the numbers in a pool, whose own dtype is `pool_format` (uint8 for any FP8).

    `stated` is SGLang's --kv-cache-dtype or a format by its own name; "auto" or nothing says that
    the pool's own is meant. Raises LayoutError where it cannot be told, or is none that a page can
    hold.
    """
    name = _FORMATS.get(stated, stated)
    if name in ("", "auto"):
        name = pool_format
    if name == "uint8":
        raise LayoutError(
            "the host pool holds uint8, and SGLang does not say of which FP8 format",
            remedy='start SGLang with --kv-cache-dtype, or set "kvtier_kv_dtype"',
        )
    if _POOL_FORMATS.get(name) != itemsize:
        raise LayoutError(
            f"KV of {name} in a host pool of {itemsize} bytes a number cannot be stored",
            remedy="use bfloat16, float16, fp8_e4m3 or fp8_e5m2 for the KV cache",
        )
    return name


def part_layouts(shape: PoolShape, identity: Identity, ranks: Ranks) -> tuple[PartLayout, ...]:
    """What the objects of a page are. Raises LayoutError for what cannot be stored, by name."""
    order = STORAGE_ORDERS.get(shape.mem_layout)
    if order is None:
        raise LayoutError(
            f"--hicache-mem-layout {shape.mem_layout} cannot be stored",
            remedy=f"use one of {', '.join(STORAGE_ORDERS)}",
        )
    if shape.is_latent:
        parts = [("latent", Role.LATENT, shape.key_dim)]
    else:
        parts = [("k", Role.KEY, shape.key_dim), ("v", Role.VALUE, shape.value_dim)]
    heads, layers = _of_model(shape, ranks)
    shard, shards = _shard(shape, ranks)
    made = []
    for number, (name, role, dim) in enumerate(parts):
        is_scaled = role is not Role.LATENT and identity.kv_format in _SCALED
        segment = Segment(
            name=".".join(filter(None, (shape.pool, name, shape.row_form))),
            role=role,
            dtype=identity.kv_format,
            layers=layers,
            heads=heads,
            dim=dim,
            scale_rule=ScaleRule.LAYER_HEAD if is_scaled else ScaleRule.NONE,
        )
        layout = Layout.from_segments(
            [segment],
            model_id=identity.model_id,
            revision=identity.weights_revision,
            page_tokens=shape.page_tokens,
            kv_compute=identity.kv_compute or identity.kv_format,
            storage_order=order,
            shard_count=shards,
            shard=shard,
        )
        made.append(PartLayout(buffer=number, layout=layout))
    return tuple(made)


def _of_model(shape: PoolShape, ranks: Ranks) -> tuple[int, int]:
    """Heads and layers of the whole model. Where ranks share a head each counts as one: then the
    pages of one tensor parallel size are apart from those of another, as they are anyway.
    """
    heads = 1 if shape.is_latent else shape.heads * ranks.tp_size
    if ranks.pp_size == 1:
        return heads, shape.layers
    if ranks.model_layers < shape.first_layer + shape.layers:
        raise LayoutError(
            f"with a pipeline parallel size of {ranks.pp_size} the layers of the whole model have "
            f"to be known, and {ranks.model_layers or 'none'} were given",
            remedy='set "kvtier_model_layers" to the number of layers of the model',
        )
    return heads, ranks.model_layers


def _shard(shape: PoolShape, ranks: Ranks) -> tuple[Shard, int]:
    """The part of a page that this rank holds, and how many parts there are."""
    begin = shape.first_layer if ranks.pp_size > 1 else 0
    layers = (begin, begin + shape.layers)
    if shape.is_latent:
        return Shard(index=ranks.pp_rank, layers=layers, heads=(0, 1)), ranks.pp_size
    first_head = ranks.tp_rank * shape.heads
    shard = Shard(
        index=ranks.pp_rank * ranks.tp_size + ranks.tp_rank,
        layers=layers,
        heads=(first_head, first_head + shape.heads),
    )
    return shard, ranks.pp_size * ranks.tp_size
