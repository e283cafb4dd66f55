"""What an engine is set to, and what its pages are. Values, usable from any thread."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvtier import Layout
from kvtier_engine.model.load import LoadedModel

__all__ = ["EngineSettings", "Integrity", "layout_of"]


class Integrity(enum.Enum):
    """TAGS compares the tags of all pages that a pass reads with those that were given."""

    TAGS = "tags"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """`queue_requests_max` may wait, `running_requests_max` have pages at a time.

    A prefill pass has `chunk_pages` whole pages. KV depends, in its last bits, on the pass that
    computed it: so a cache hit ends at a multiple of them, and a prompt's KV is the same with it.
    """

    queue_requests_max: int = 256
    running_requests_max: int = 64
    chunk_pages: int = 1
    integrity: Integrity = Integrity.OFF


def layout_of(model: LoadedModel, *, page_tokens: int) -> Layout:
    """What the pages of this model's KV are, for the pool and for kvtier."""
    return Layout.from_hf(
        model.network.config.hf,
        revision=model.revision,
        page_tokens=page_tokens,
        dtype=model.network.dtype,
        model_id=model.name,
    )
