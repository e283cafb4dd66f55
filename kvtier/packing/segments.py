"""The parts a layout is made of: segments (named tensors of the whole model) and the shard's cut.

Both check themselves when they are made, so a value of these types is always sound by itself; what
must hold between them is checked by `Layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvtier.errors import LayoutError
from kvtier.packing.dtypes import DTYPE_BYTES

__all__ = ["Role", "ScaleRule", "Segment", "Shard", "check_count", "check_kind", "check_text"]

#: Far above every known model; keeps each product of a layout inside 64 bits.
COUNT_MAX = 1 << 20
#: The store looks at every shard of a family for each key, and numbers shards with 16 bits.
SHARDS_MAX = 1024
_COUNT_MAX_OF = {"shard_count": SHARDS_MAX}
TEXT_BYTES_MAX = 4096


class Role(IntEnum):
    """What a segment's numbers are. The numbers are those of kvtier.v1.SegmentRole."""

    KEY = 1
    VALUE = 2
    LATENT = 3
    ROPE = 4
    DRAFT_KEY = 5
    DRAFT_VALUE = 6
    OPAQUE = 7

    @property
    def is_draft(self) -> bool:
        return self in (Role.DRAFT_KEY, Role.DRAFT_VALUE)

    @property
    def is_cut_by_heads(self) -> bool:
        """Tensor parallel ranks hold some of the heads; of the other roles each rank holds all."""
        return self in (Role.KEY, Role.VALUE, Role.DRAFT_KEY, Role.DRAFT_VALUE)


class ScaleRule(IntEnum):
    """Which numbers share one float32 scale. The numbers are those of kvtier.v1.ScaleRule."""

    NONE = 1
    LAYER_HEAD = 2


_PACKABLE_DTYPES = frozenset({"bfloat16", "float16", "float32"})
_KEPT_ROLES = frozenset({Role.ROPE, Role.OPAQUE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One named tensor of a page, of the whole model: (layers, page_tokens, heads, dim) of `dtype`.

    `scale_rule` LAYER_HEAD lets the fp8 codec pack the segment; with NONE it is kept bit for bit.
    """

    name: str
    role: Role
    dtype: str
    layers: int
    heads: int
    dim: int
    scale_rule: ScaleRule

    def __post_init__(self) -> None:
        check_text("segment name", self.name, required=True)
        check_kind(f"segment {self.name!r}: role", self.role, Role)
        check_kind(f"segment {self.name!r}: scale_rule", self.scale_rule, ScaleRule)
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(
                f"segment {self.name!r}: dtype {self.dtype!r} is not a format that a page can hold",
                remedy=f"use one of {', '.join(sorted(DTYPE_BYTES))}",
            )
        for field in ("layers", "heads", "dim"):
            check_count(f"segment {self.name!r}: {field}", getattr(self, field))
        self._check_scale_rule()

    def _check_scale_rule(self) -> None:
        if self.scale_rule is ScaleRule.NONE:
            return
        if self.role in _KEPT_ROLES or self.dtype not in _PACKABLE_DTYPES:
            raise LayoutError(
                f"segment {self.name!r}: scale_rule {self.scale_rule.name} on a {self.role.name} "
                f"segment of {self.dtype}, which no codec packs",
                remedy="use ScaleRule.NONE; only bfloat16, float16 and float32 segments that are "
                "neither ROPE nor OPAQUE have scales",
            )

    @property
    def is_packable(self) -> bool:
        """Whether the fp8 codec turns this segment into codes with scales."""
        return self.scale_rule is ScaleRule.LAYER_HEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of every page that one rank holds, as half-open ranges over the whole model.

    `layers` cuts the main model's layers, `heads` its KV heads (see `Layout` for which segments).
    """

    index: int = 0
    layers: tuple[int, int]
    heads: tuple[int, int]

    def __post_init__(self) -> None:
        if not _is_int(self.index) or not 0 <= self.index < SHARDS_MAX:
            raise LayoutError(
                f"shard.index {self.index!r} is not a whole number from 0 to {SHARDS_MAX - 1}",
                remedy="number the shards of a family from 0",
            )
        for field in ("layers", "heads"):
            bounds = getattr(self, field)
            if not _is_range(bounds):
                raise LayoutError(
                    f"shard.{field} {bounds!r} is not a range (start, end) with 0 <= start < end",
                    remedy=f"pass the half-open range of {field} that this shard holds as a tuple",
                )


def check_count(field: str, value: object) -> None:
    """Raises LayoutError unless `value` is a whole number from 1 to the most of this field."""
    most = _COUNT_MAX_OF.get(field, COUNT_MAX)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise LayoutError(
            f"{field} is {value!r}",
            remedy=f"{field} must be a whole number from 1 to {most}",
        )


def check_kind(field: str, value: object, kind: type) -> None:
    """Raises LayoutError unless `value` is a `kind`; for an enum a bare number is not enough."""
    if not isinstance(value, kind):
        raise LayoutError(f"{field} is {value!r}", remedy=f"pass a {kind.__name__}")


def check_text(field: str, value: object, *, required: bool) -> None:
    """Raises LayoutError unless `value` is text that encodes to at most TEXT_BYTES_MAX of UTF-8."""
    if not isinstance(value, str):
        raise LayoutError(f"{field} is {value!r}", remedy=f"{field} must be a string")
    if required and not value:
        raise LayoutError(
            f"{field} is empty",
            remedy=f"pass {field}: without it two different models could share pages",
        )
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise LayoutError(
            f"{field} is not valid Unicode text", remedy=f"pass {field} without lone surrogates"
        ) from error
    if len(encoded) > TEXT_BYTES_MAX:
        raise LayoutError(
            f"{field} has {len(encoded)} bytes of UTF-8",
            remedy=f"{field} may have up to {TEXT_BYTES_MAX} bytes",
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_range(bounds: object) -> bool:
    return (
        isinstance(bounds, tuple)
        and len(bounds) == 2
        and all(map(_is_int, bounds))
        and 0 <= bounds[0] < bounds[1] <= COUNT_MAX
    )
