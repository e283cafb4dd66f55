"""What is there, whole, and what a router was told of it.

A page of SGLang is several objects to the daemon: K and V, a shard for each rank. A block is told
as stored in a medium while every object of it is in that tier and its tokens are known, and as
removed as soon as one is not: a router never believes in a page of which a part is gone.

What is told is the difference between what was told and what is there, whatever led to it; so a
new snapshot after events were lost ends in the same place as if none had been.

Pure, belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvtier import Tier
from kvtier_sglang.events.blocks import Blocks
from kvtier_sglang.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Medium,
    block_hash,
)

__all__ = ["Mirror"]

_KEY_BYTES: Final = 32


class Mirror:
    """`objects` is how many objects a page has; they are numbered from 0 on. `host` is what host
    memory is called.
    """

    def __init__(self, blocks: Blocks, *, objects: int, host: Medium = Medium.EXTERNAL) -> None:
        self._blocks = blocks
        self._whole = (1 << objects) - 1
        self._media = {Tier.HOST: host, Tier.NVME: Medium.DISK}
        #: For each medium: a bit an object, of the blocks that have one there.
        self._there: dict[Medium, dict[int, int]] = {medium: {} for medium in self._media.values()}
        self._told: dict[Medium, set[int]] = {medium: set() for medium in self._media.values()}
        self._changed: set[int] = set()

    def stored(self, tier: Tier, number: int, keys: bytes) -> None:
        """Object `number` of the pages `keys`, concatenated, is in `tier` now."""
        if (medium := self._media.get(tier)) is not None:
            self._add(medium, number, _names(keys))

    def removed(self, tier: Tier, number: int, keys: bytes) -> None:
        """It has left the tier."""
        if (medium := self._media.get(tier)) is not None:
            self._drop(medium, number, _names(keys))

    def is_just(self, number: int, there: Mapping[Tier, bytes | bytearray]) -> None:
        """Object `number` is there for these pages, and for no other."""
        for tier, medium in self._media.items():
            names = set(_names(there.get(tier, b"")))
            bit = 1 << number
            gone = [
                name
                for name, bits in self._there[medium].items()
                if bits & bit and name not in names
            ]
            self._drop(medium, number, gone)
            self._add(medium, number, names)

    def learned(self, names: Iterable[int]) -> None:
        """Of these blocks the tokens are known now, or are not any more."""
        self._changed.update(names)

    def take(self) -> list[Event]:
        """What a router has to be told now. Removals first, then chains from their heads on."""
        changed, self._changed = self._changed, set()
        events: list[Event] = []
        for medium, told in self._told.items():
            gone = [name for name in changed & told if not self._is_there(medium, name)]
            told.difference_update(gone)
            if gone:
                events.append(BlockRemoved(medium=medium, hashes=tuple(sorted(gone))))
        for medium, told in self._told.items():
            new = [name for name in changed - told if self._is_there(medium, name)]
            told.update(new)
            events += self._chains(medium, new)
        return events

    def all(self) -> Iterator[Event]:
        """All that was told and still holds, for somebody who knows nothing, or wrong things. It is
        read between two calls of `take`, while no blocks are learned.
        """
        yield AllBlocksCleared()
        still_there = [
            (medium, [name for name in told if self._is_there(medium, name)])
            for medium, told in self._told.items()
        ]
        for medium, still in still_there:
            yield from self._chains(medium, still)

    def _is_there(self, medium: Medium, name: int) -> bool:
        return self._there[medium].get(name) == self._whole and name in self._blocks

    def _add(self, medium: Medium, number: int, names: Iterable[int]) -> None:
        there, bit = self._there[medium], 1 << number
        for name in names:
            bits = there.get(name, 0)
            if not bits & bit:
                there[name] = bits | bit
                self._changed.add(name)

    def _drop(self, medium: Medium, number: int, names: Iterable[int]) -> None:
        there, bit = self._there[medium], 1 << number
        for name in names:
            bits = there.get(name, 0)
            if bits & bit:
                self._changed.add(name)
                if bits == bit:
                    del there[name]
                else:
                    there[name] = bits ^ bit

    def _chains(self, medium: Medium, names: Iterable[int]) -> Iterator[BlockStored]:
        ends: dict[int, list[int]] = {}
        chains: list[list[int]] = []
        for name in sorted(names, key=lambda name: (self._blocks[name].depth, name)):
            parent = self._blocks[name].parent
            chain = None if parent is None else ends.pop(parent, None)
            if chain is None:
                chain = []
                chains.append(chain)
            chain.append(name)
            ends[name] = chain
        return (self._stored(medium, chain) for chain in chains)

    def _stored(self, medium: Medium, chain: Sequence[int]) -> BlockStored:
        return BlockStored(
            medium=medium,
            hashes=tuple(chain),
            parent=self._blocks[chain[0]].parent,
            tokens=tuple(token for name in chain for token in self._blocks[name].tokens),
            block_tokens=self._blocks.block_tokens,
        )


def _names(keys: bytes | bytearray) -> list[int]:
    return [block_hash(keys[at : at + _KEY_BYTES]) for at in range(0, len(keys), _KEY_BYTES)]
