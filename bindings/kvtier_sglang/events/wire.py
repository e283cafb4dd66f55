"""The events and how they are written: msgpack, as SGLang 0.5.23 (and vLLM) publish theirs.

A batch is an array of the time, the events and the data parallel rank; an event is a map with its
name under `type`, of which optional fields that say nothing are left out. The source of the format
is sglang.srt.disaggregation.kv_events; tests decode what is made here with the classes there.

Immutable values and pure functions: usable from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import msgpack

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "Event", "Medium", "block_hash",
           "encode"]  # fmt: skip

_HASH_BYTES: Final = 8


class Medium(Enum):
    """Where a block is, by SGLang's names: kvtier's host memory is EXTERNAL, for it is not the
    engine's own (which is CPU_PINNED); its NVMe tier is DISK. A router that looks into EXTERNAL
    behind DISK alone wants host memory told as CPU_PINNED.
    """

    EXTERNAL = "EXTERNAL"
    CPU_PINNED = "CPU_PINNED"
    DISK = "DISK"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A chain of blocks, each the parent of the next; `parent` is before the first, None at a
    prompt's head. `tokens` are those of all blocks, `block_tokens` of each.
    """

    medium: Medium
    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks that left this medium, not necessarily the other."""

    medium: Medium
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Nothing that was told before holds."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def block_hash(page_hash: bytes | bytearray) -> int:
    """What events call the page with this key: its first eight bytes as a signed number."""
    return int.from_bytes(page_hash[:_HASH_BYTES], "big", signed=True)


def encode(events: Sequence[Event], *, stamp: float, dp_rank: int) -> bytes:
    """One batch. `stamp` is in seconds since 1970."""
    packed: bytes = msgpack.packb([stamp, [_fields(event) for event in events], dp_rank])
    return packed


def _fields(event: Event) -> dict[str, Any]:
    name = type(event).__name__
    if isinstance(event, AllBlocksCleared):
        return {"type": name}
    if isinstance(event, BlockRemoved):
        return {"type": name, "block_hashes": event.hashes, "medium": event.medium.value}
    return {
        "type": name,
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": event.tokens,
        "block_size": event.block_tokens,
        "lora_id": None,
        "medium": event.medium.value,
    }
