"""Events in batches of a size that readers and memory can bear.

Pure functions; usable from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from kvtier_sglang.events.wire import AllBlocksCleared, BlockStored, Event

__all__ = ["batches"]

_BLOCKS_A_BATCH_MAX: Final = 4096


def batches(events: Iterable[Event]) -> Iterator[list[Event]]:
    """In order, some thousand blocks each. A chain is cut where it is longer."""
    batch: list[Event] = []
    blocks = 0
    for event in _cut(events):
        size = 1 if isinstance(event, AllBlocksCleared) else len(event.hashes)
        if batch and blocks + size > _BLOCKS_A_BATCH_MAX:
            yield batch
            batch, blocks = [], 0
        batch.append(event)
        blocks += size
    if batch:
        yield batch


def _cut(events: Iterable[Event]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, AllBlocksCleared):
            yield event
            continue
        for begin in range(0, len(event.hashes), _BLOCKS_A_BATCH_MAX):
            hashes = event.hashes[begin : begin + _BLOCKS_A_BATCH_MAX]
            if isinstance(event, BlockStored):
                yield replace(
                    event,
                    hashes=hashes,
                    parent=event.hashes[begin - 1] if begin else event.parent,
                    tokens=event.tokens[begin * event.block_tokens :][
                        : len(hashes) * event.block_tokens
                    ],
                )
            else:
                yield replace(event, hashes=hashes)
