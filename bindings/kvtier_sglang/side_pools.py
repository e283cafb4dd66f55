"""The host pools beside the primary one: what a page of each is to kvtier, and its rows.

Three forms are taken: pools of keys and values or latents as the primary one (sliding window, draft
models), states of a fixed size (Mamba and other linear attention), and the keys of the indexer of
sparse attention. What is none of them, or cannot be told apart from another server's, is refused by
name. The family of a side pool has its name, buffers, shapes, formats, layers, division into ranks,
and the format of the KV that the model read while it was made.

Looks at attributes alone: SGLang is not loaded, and torch only as whoever made the pool has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

from kvtier import Layout, LayoutError, Role, ScaleRule, Segment, Shard
from kvtier_sglang.layouts import Identity, PartLayout, Ranks, number_format, part_layouts
from kvtier_sglang.pools import rows_of, shape_of

if TYPE_CHECKING:
    import torch

__all__ = ["Model", "SidePool", "side_pool"]

_PLAIN: Final = ("swa", "draft", "draft_swa")
_INDEXERS: Final = ("indexer", "draft_indexer")
_STATES: Final = ("mamba",)
#: Beside these there is nothing that was seen to come back right.
_KNOWN: Final = (*_PLAIN, *_INDEXERS, *_STATES)
_PAGES_FIRST: Final = ("page_first", "page_first_direct")
#: Bytes of a page whose axes mean nothing here: layers, then whatever a layer has.
_ORDER: Final = "LTHD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Whose side pools these are. `kv_format` of `identity` is that of the primary pool;
    `page_tokens` are its. `is_replicated` says that all tensor parallel ranks hold the same KV, of
    which SGLang has one rank store it. `draft` names the draft model, `state_kernels` what decides
    the form of states; `stated_format` is --kv-cache-dtype.
    """

    identity: Identity
    ranks: Ranks
    page_tokens: int
    is_replicated: bool
    stated_format: str
    draft: str = ""
    state_kernels: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidePool:
    """`rows` are the pool's buffers with the pages first, one for each of `parts`; a page of the
    pool has `page_slots` slots.
    """

    name: str
    parts: tuple[PartLayout, ...]
    rows: tuple[torch.Tensor, ...]
    page_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffer:
    """Rows of (pages, layers, ...), kept bit for bit."""

    name: str
    rows: torch.Tensor
    layers: int
    shape: tuple[int, ...]


def side_pool(name: str, pool: Any, model: Model) -> SidePool:
    """Raises LayoutError naming what cannot be taken, and what to do instead."""
    if name not in _KNOWN:
        raise _refused(name, pool, f"only {', '.join(_KNOWN)} are stored beside KV")
    if model.ranks.pp_size > 1:
        raise _refused(name, pool, "with pipeline parallelism nobody says which layers it has")
    if name.startswith("draft"):
        drafting = replace(
            model.identity, model_id=f"{model.identity.model_id}, draft model {model.draft}"
        )
        model = replace(model, identity=drafting)
    if name in _STATES:
        return _of_states(name, pool, model)
    if name in _INDEXERS:
        return _of_indexer(name, pool, model)
    return _plain(name, pool, model)


def _plain(name: str, pool: Any, model: Model) -> SidePool:
    shape = shape_of(pool, name)
    if model.is_replicated and not shape.is_latent and model.ranks.tp_size > 1:
        raise _refused(name, pool, "its ranks hold different heads and SGLang has one store them")
    identity = replace(
        model.identity,
        kv_format=number_format(_stated(pool, model), _dtype(pool.dtype), pool.dtype.itemsize),
        kv_compute=model.identity.kv_format,
    )
    return SidePool(
        name=name,
        parts=part_layouts(shape, identity, model.ranks),
        rows=rows_of(pool, shape),
        page_slots=shape.page_tokens,
    )


def _of_states(name: str, pool: Any, model: Model) -> SidePool:
    """MambaPoolHost: a page is the state after the last token of a page of KV."""
    _need(name, pool, ("temporal_buffer", "conv_buffer", "layout", "page_size", "num_mamba_layers"))
    if pool.layout not in _PAGES_FIRST:
        raise _refused(name, pool, f"its layout is {pool.layout}")
    if pool.page_size != 1:
        raise _refused(name, pool, f"it has {pool.page_size} slots a page")
    if getattr(pool, "mtp_draft_buffer_infos", ()):
        raise _refused(name, pool, "it holds layers of a draft model")
    layers = pool.num_mamba_layers
    named = [("temporal", pool.temporal_buffer)]
    named += [(f"conv{number}", rows) for number, rows in enumerate(pool.conv_buffer)]
    buffers = []
    for part, rows in named:
        if tuple(rows.shape[1:3]) != (layers, 1):
            raise _refused(name, pool, f"its {part} is of shape {tuple(rows.shape)}")
        made = _Buffer(name=part, rows=rows, layers=layers, shape=tuple(rows.shape[3:]))
        if rows.numel():  # without recurrence there is nothing in the first
            buffers.append(made)
    for number, rows in enumerate(getattr(pool, "slot_state_buffers", ())):
        made = _Buffer(name=f"extra{number}", rows=rows, layers=1, shape=tuple(rows.shape[1:]))
        buffers.append(made)
    for made in buffers:
        if not made.rows.is_contiguous():
            raise _refused(name, pool, f"its {made.name} does not lie in one piece")
    form = f"{model.page_tokens} {model.state_kernels}"
    ranks = (model.ranks.tp_rank, model.ranks.tp_size)
    return _opaque(name, buffers, model, form=form, page_slots=1, ranks=ranks)


def _of_indexer(name: str, pool: Any, model: Model) -> SidePool:
    """DSAIndexerPoolHost: index keys and their scales, page by page in the order of a kernel."""
    _need(name, pool, ("index_k_with_scale_buffer", "layout", "page_size", "layer_num"))
    buffer, layers = pool.index_k_with_scale_buffer, pool.layer_num
    if buffer is None:
        raise _refused(name, pool, "it has no buffer of its own")
    if getattr(pool, "target_layer_num", layers) != layers:
        raise _refused(name, pool, "it holds layers of a draft model")
    if not model.is_replicated and model.ranks.tp_size > 1:
        raise _refused(name, pool, "nobody says what of it each rank holds")
    if pool.layout == "layer_first":
        is_right, rows = buffer.dim() == 3 and buffer.shape[0] == layers, buffer.transpose(0, 1)
    else:
        is_right = buffer.dim() == 4 and tuple(buffer.shape[1:3]) == (layers, 1)
        rows, is_right = buffer, is_right and pool.layout in _PAGES_FIRST
    if not is_right or not buffer.is_contiguous():
        raise _refused(name, pool, f"a buffer of {tuple(buffer.shape)} in layout {pool.layout}")
    made = _Buffer(name="keys", rows=rows, layers=layers, shape=(int(buffer.shape[-1]),))
    device = getattr(pool, "device_pool", None)
    sizes = [getattr(device, size, "") for size in ("index_head_dim", "quant_block_size")]
    form = f"{pool.page_size} {type(pool).__name__} {sizes[0]} {sizes[1]}"
    return _opaque(name, [made], model, form=form, page_slots=pool.page_size, ranks=(0, 1))


def _opaque(
    name: str,
    buffers: Sequence[_Buffer],
    model: Model,
    *,
    form: str,
    page_slots: int,
    ranks: tuple[int, int],
) -> SidePool:
    """Pages of bytes that nothing of kvtier looks into; each of `ranks` has its own."""
    parts = []
    for number, buffer in enumerate(buffers):
        heads, dim = buffer.shape[0], prod(buffer.shape[1:])
        segment = Segment(
            name=f"{name}.{buffer.name} {'x'.join(map(str, buffer.shape))} {form}".strip(),
            role=Role.OPAQUE,
            dtype=_dtype(buffer.rows.dtype),
            layers=buffer.layers,
            heads=heads,
            dim=dim,
            scale_rule=ScaleRule.NONE,
        )
        layout = Layout.from_segments(
            [segment],
            model_id=model.identity.model_id,
            revision=model.identity.weights_revision,
            page_tokens=1,
            kv_compute=model.identity.kv_format,
            storage_order=_ORDER,
            shard_count=ranks[1],
            shard=Shard(index=ranks[0], layers=(0, buffer.layers), heads=(0, heads)),
        )
        parts.append(PartLayout(buffer=number, layout=layout))
    rows = tuple(buffer.rows for buffer in buffers)
    return SidePool(name=name, parts=tuple(parts), rows=rows, page_slots=page_slots)


def _stated(pool: Any, model: Model) -> str:
    """A draft model may have another format; a pool of bytes alone does not say which."""
    return model.stated_format if _dtype(pool.dtype) == "uint8" else "auto"


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _need(name: str, pool: Any, attributes: Sequence[str]) -> None:
    missing = [attribute for attribute in attributes if not hasattr(pool, attribute)]
    if missing:
        raise _refused(name, pool, f"it has no {', '.join(missing)}")


def _refused(name: str, pool: Any, why: str) -> LayoutError:
    return LayoutError(
        f"the model's side pool {name} ({type(pool).__name__}) cannot be stored by kvtier: {why}",
        remedy="run this model, or this division into ranks, without --hicache-storage-backend",
    )
