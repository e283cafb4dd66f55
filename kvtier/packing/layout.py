"""The layout: what the bytes of a page are and which model made them.

A Layout is checked when it is made and never changes, so whoever holds one need not check it again.
It is safe to share between threads. Two engines may share pages exactly when their fingerprints are
equal: every setting that changes what a page's bytes mean is a field here.

How a shard cuts the model: KEY, VALUE and DRAFT_* segments by `shard.heads`, LATENT and ROPE never
by heads (each rank holds all of them); all but DRAFT_* and OPAQUE by `shard.layers`; DRAFT_*
segments belong whole to the shards whose layers end at the model's last one; OPAQUE segments are
held whole by every shard.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, Unpack

from kvtier.core.page import Codec
from kvtier.errors import LayoutError
from kvtier.packing.dtypes import dtype_name
from kvtier.packing.fingerprint import family_fingerprint
from kvtier.packing.geometry import (
    Span,
    check_shard,
    model_heads,
    model_layers,
    plan_page,
    whole_shard,
)
from kvtier.packing.layout_presets import latent_segments, read_hf_config
from kvtier.packing.segments import Role, ScaleRule, Segment, Shard, check_count, check_text

__all__ = ["Layout", "LayoutOptions", "Role", "ScaleRule", "Segment", "Shard", "Span"]

_PAGE_TOKENS_MAX = 1 << 16
_REQUIRED_TEXT = ("model_id", "weights_revision", "kv_compute", "key_scheme")
_OPTIONAL_TEXT = ("adapter_id", "adapter_revision", "rope")


class LayoutOptions(TypedDict, total=False):
    """What every way of making a Layout takes; the meanings are those of Layout's fields."""

    adapter_id: str
    adapter_revision: str
    key_scheme: str
    storage_order: str
    shard_count: int
    shard: Shard | None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One model's pages, seen from one shard. Raises LayoutError naming the field that is wrong.

    `kv_compute` is the dtype of the KV that attention read while this KV was computed, and may name
    what else an engine's numbers depend on; `rope` the canonical text of the rotary settings;
    `storage_order` a permutation of "LTHD" (layer, token, head, dim); `segments` describe the whole
    model and `shard` the part of it that these pages hold.
    """

    model_id: str
    weights_revision: str
    adapter_id: str = ""
    adapter_revision: str = ""
    kv_compute: str
    rope: str = ""
    key_scheme: str = "sha256-chain-u32"
    page_tokens: int
    storage_order: str = "LTHD"
    segments: tuple[Segment, ...]
    shard_count: int = 1
    shard: Shard

    def __post_init__(self) -> None:
        for field in _REQUIRED_TEXT:
            check_text(field, getattr(self, field), required=True)
        for field in _OPTIONAL_TEXT:
            check_text(field, getattr(self, field), required=False)
        if bool(self.adapter_id) != bool(self.adapter_revision):
            raise LayoutError(
                f"adapter_id {self.adapter_id!r} with adapter_revision {self.adapter_revision!r}",
                remedy="give both or neither: an adapter reloaded in place makes other KV",
            )
        check_count("page_tokens", self.page_tokens)
        if self.page_tokens > _PAGE_TOKENS_MAX:
            raise LayoutError(
                f"page_tokens is {self.page_tokens}",
                remedy=f"a page has 1 to {_PAGE_TOKENS_MAX} tokens",
            )
        check_text("storage_order", self.storage_order, required=True)
        if sorted(self.storage_order) != sorted("LTHD"):
            raise LayoutError(
                f"storage_order {self.storage_order!r} is no permutation of 'LTHD'",
                remedy="name each of L (layer), T (token), H (head), D (dim) once, outermost first",
            )
        _check_segments(self.segments)
        check_count("shard_count", self.shard_count)
        check_shard(self)

    @classmethod
    def from_hf(
        cls,
        config: object,
        *,
        revision: str,
        page_tokens: int,
        dtype: object,
        model_id: str | None = None,
        kv_compute: str | None = None,
        **options: Unpack[LayoutOptions],
    ) -> Layout:
        """The layout of a Hugging Face model from its config, an object or the dict of config.json.

        `dtype` (a torch dtype or its name) is the format of the cached numbers. Without `model_id`
        the config's own name is used, without `kv_compute` the dtype. Models with multi-head latent
        attention get a latent and a rope segment, others k and v. Raises LayoutError for a model
        whose cache is not of one of these two forms.
        """
        name = dtype_name(dtype)
        model = read_hf_config(config, name)
        return cls._made(
            model.segments,
            options,
            model_id=model.model_id if model_id is None else model_id,
            weights_revision=revision,
            page_tokens=page_tokens,
            kv_compute=name if kv_compute is None else kv_compute,
            rope=model.rope,
        )

    @classmethod
    def mla(
        cls,
        *,
        model_id: str,
        revision: str,
        page_tokens: int,
        dtype: object,
        layers: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        rope: str = "",
        kv_compute: str | None = None,
        **options: Unpack[LayoutOptions],
    ) -> Layout:
        """The layout of a model with multi-head latent attention: per layer and token one latent
        vector of `kv_lora_rank` numbers and one rotary part of `qk_rope_head_dim`."""
        name = dtype_name(dtype)
        return cls._made(
            latent_segments(layers, kv_lora_rank, qk_rope_head_dim, name),
            options,
            model_id=model_id,
            weights_revision=revision,
            page_tokens=page_tokens,
            kv_compute=name if kv_compute is None else kv_compute,
            rope=rope,
        )

    @classmethod
    def from_segments(
        cls,
        segments: tuple[Segment, ...] | list[Segment],
        *,
        model_id: str,
        revision: str,
        page_tokens: int,
        kv_compute: str,
        rope: str = "",
        **options: Unpack[LayoutOptions],
    ) -> Layout:
        """The layout of anything else; `segments` of the whole model, ordered as their bytes."""
        return cls._made(
            tuple(segments),
            options,
            model_id=model_id,
            weights_revision=revision,
            page_tokens=page_tokens,
            kv_compute=kv_compute,
            rope=rope,
        )

    @classmethod
    def _made(
        cls, segments: tuple[Segment, ...], options: LayoutOptions, **identity: Any
    ) -> Layout:
        _check_segments(segments)
        shard = options.get("shard")
        if shard is None:
            if options.get("shard_count", 1) != 1:
                raise LayoutError(
                    f"shard_count is {options['shard_count']} and shard is missing",
                    remedy="say with shard=Shard(index=, layers=, heads=) what these pages hold",
                )
            shard = whole_shard(segments)
        fields_given: dict[str, Any] = {**options, **identity, "shard": shard}
        return cls(segments=segments, **fields_given)

    @property
    def model_layers(self) -> int:
        """Layers of the main model, the range of Shard.layers."""
        return model_layers(self.segments)

    @property
    def model_heads(self) -> int:
        """KV heads of the main model, the range of Shard.heads."""
        return model_heads(self.segments)

    @property
    def raw_bytes(self) -> int:
        """Bytes of this shard's payload as its maker computed it."""
        # Asked for in every call; to look the plan up has all fields hashed. A cached_property has
        # a lock in Python 3.11, which a fork can leave locked.
        known: int | None = self.__dict__.get("_raw_bytes")
        if known is None:
            known = self.__dict__["_raw_bytes"] = plan_page(self, Codec.RAW).nbytes
        return known

    @property
    def fp8_bytes(self) -> int:
        """Bytes of this shard's payload packed as fp8, 0 if nothing in it can be packed."""
        return plan_page(self, Codec.FP8).nbytes if self._is_packable() else 0

    @property
    def scales_span(self) -> tuple[int, int]:
        """(offset in bytes, count) of the float32 scales in the fp8 payload. Raises LayoutError as
        `spans`.
        """
        plan = plan_page(self, Codec.FP8)
        return plan.scales_offset, plan.scales_count

    def payload_bytes(self, codec: Codec) -> int:
        """Bytes of this shard's payload. Raises LayoutError for FP8 if nothing can be packed."""
        return plan_page(self, codec).nbytes

    def spans(self, codec: Codec) -> tuple[Span, ...]:
        """The places of the segments that this shard holds, in the order of their bytes.

        Raises LayoutError for FP8 if nothing in it can be packed.
        """
        return plan_page(self, codec).spans

    def fingerprint(self, tenant: str, salt: bytes = b"") -> bytes:
        """The 32-byte family fingerprint: equal exactly if all but the shard is equal."""
        check_text("tenant", tenant, required=False)
        return family_fingerprint(self, tenant, salt)

    def with_shard(self, shard: Shard) -> Layout:
        """The same family seen from another of its shards. Raises LayoutError."""
        return replace(self, shard=shard)

    def difference(self, other: Layout) -> str | None:
        """The first field that differs, with the values of `self` and `other`; None if the two are
        equal.
        """
        for field in fields(self):
            if field.name == "segments":
                found = _segments_difference(self.segments, other.segments)
                if found is not None:
                    return found
                continue
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name}: {mine!r} and {theirs!r}"
        return None

    def _is_packable(self) -> bool:
        return any(span.segment.is_packable for span in self.spans(Codec.RAW))


def _check_segments(segments: object) -> None:
    if not isinstance(segments, tuple) or not all(isinstance(s, Segment) for s in segments):
        raise LayoutError(
            f"segments is {segments!r}", remedy="pass a tuple of kvtier.packing.Segment"
        )
    if not segments:
        raise LayoutError("segments is empty", remedy="a page has at least one segment")
    names = [segment.name for segment in segments]
    if len(set(names)) != len(names):
        raise LayoutError(
            f"segments: two of {names} have the same name", remedy="give each segment its own name"
        )


def _segments_difference(mine: tuple[Segment, ...], theirs: tuple[Segment, ...]) -> str | None:
    names, their_names = [s.name for s in mine], [s.name for s in theirs]
    if names != their_names:
        return f"segments: {names} and {their_names}"
    for ours, other in zip(mine, theirs, strict=True):
        for field in fields(ours):
            a, b = getattr(ours, field.name), getattr(other, field.name)
            if a != b:
                return f"segments[{ours.name!r}].{field.name}: {a!r} and {b!r}"
    return None
