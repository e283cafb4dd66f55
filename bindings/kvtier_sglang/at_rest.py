"""How pages lie in the daemon: as they are, or packed as FP8.

Packed pages take about half the room of bf16 and come back rounded. Rounded KV changes what is
computed from it, and what is computed from it lies in storage, too. So packed pages are a family of
their own: servers that asked for them share with each other, and with nobody else, in neither
direction. That is part of the family's name (`kv_compute`), not a rule that somebody has to keep.

Values and pure functions; usable from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Final

from kvtier import Codec, Layout, LayoutError
from kvtier.errors import InvalidConfigValue

__all__ = ["AtRest"]

_PACKED: Final = frozenset({"bfloat16", "float16"})


class AtRest(Enum):
    RAW = "raw"
    FP8 = "fp8"

    @classmethod
    def of(cls, name: str) -> AtRest:
        """Raises InvalidConfigValue."""
        try:
            return cls(name)
        except ValueError:
            raise InvalidConfigValue(
                f"kvtier_at_rest is {name!r}",
                remedy=f"pass one of {', '.join(known.value for known in cls)}",
            ) from None

    @property
    def codec(self) -> Codec:
        """How pages are put."""
        return Codec.RAW if self is AtRest.RAW else Codec.FP8

    @property
    def accepted(self) -> Codec | None:
        """What Namespace.get is given as its codec: FP8 takes rounded pages, None never does."""
        return None if self is AtRest.RAW else Codec.FP8

    def layouts(self, made: Sequence[Layout]) -> list[Layout]:
        """What the objects of a page are, stored so. Raises LayoutError, with the reason, where
        they cannot be packed.
        """
        if self is AtRest.RAW:
            return list(made)
        for layout in made:
            kv_format = layout.segments[0].dtype
            if kv_format not in _PACKED:
                raise LayoutError(
                    f'"kvtier_at_rest": "fp8" packs {" and ".join(sorted(_PACKED))}, and the KV '
                    f"cache is {kv_format}",
                    remedy='leave "kvtier_at_rest" out: the pages are stored as they are',
                )
            if not layout.fp8_bytes:
                raise LayoutError(
                    '"kvtier_at_rest": "fp8" packs keys and values by head, and this pool has rows '
                    "of latent attention",
                    remedy='leave "kvtier_at_rest" out: the pages are stored as they are',
                )
        return [replace(layout, kv_compute=f"{layout.kv_compute} after fp8") for layout in made]
