"""What this machine can do at best: memmove of pieces, and xxh3-128 alone.

    python -m benchmarks.memory [--quick] [--rounds 9] [--json FILE]

Pieces of one size from 256 MiB of populated memory to other 256 MiB, in random order, one core; the
sum is taken over the same pieces in the same order, one call a piece. Medians over the rounds.
"""

from __future__ import annotations

import ctypes
import random
import sys
import time
from collections.abc import Iterator

import numpy as np
import xxhash

from benchmarks.common import in_turn
from benchmarks.plan import Measured, Plan, finish, parser_of
from benchmarks.rows import Row, size_text

__all__ = ["SIZES", "Pieces", "rows"]

POOL_BYTES = 256 << 20
SIZES = (64 << 10, 368 << 10, 2 << 20, 8 << 20)


class Pieces:
    """Populated memory cut into pieces of one size, and as much for each side to copy them to."""

    def __init__(self, nbytes: int, pool_bytes: int, seed: int) -> None:
        self.nbytes = nbytes
        self.count = max(1, pool_bytes // nbytes)
        total = self.count * nbytes
        self.source = np.random.default_rng(seed).integers(0, 256, total, np.uint8)
        self.target = np.ones(total, np.uint8)
        #: Of memmove alone, which must not make up for what the other side did not write.
        self.copied = np.ones(total, np.uint8)

    @property
    def pages(self) -> np.ndarray:
        return self.source.reshape(self.count, self.nbytes)

    @property
    def pool(self) -> np.ndarray:
        return self.target.reshape(self.count, self.nbytes)

    def memmove(self, order: list[int]) -> float:
        """Seconds."""
        source, target, nbytes = self.source.ctypes.data, self.copied.ctypes.data, self.nbytes
        move = ctypes.memmove
        began = time.perf_counter()
        for i in order:
            move(target + i * nbytes, source + i * nbytes, nbytes)
        return time.perf_counter() - began

    def xxh3(self, order: list[int]) -> float:
        """Seconds."""
        pieces = [memoryview(self.pages[i]) for i in order]
        summed = xxhash.xxh3_128_intdigest
        began = time.perf_counter()
        for piece in pieces:
            summed(piece)
        return time.perf_counter() - began


def rows(plan: Plan) -> Iterator[Measured]:
    for nbytes in SIZES:
        yield from of_size(plan, nbytes, plan.sized(POOL_BYTES, 32 << 20))


def of_size(plan: Plan, nbytes: int, pool_bytes: int) -> list[Measured]:
    """Copies and sums of pieces of one size."""
    size = size_text(nbytes)
    names = [f"machine/{what}-{size.replace(' ', '')}" for what in ("memcpy", "xxh3")]
    if not any(map(plan.wants, names)):
        return []
    pieces = Pieces(nbytes, pool_bytes, plan.seed)
    draw = random.Random(plan.seed)
    order = draw.sample(range(pieces.count), pieces.count)
    moved = pieces.count * nbytes / 1e9
    pairs = in_turn(
        lambda _: moved / pieces.xxh3(order), lambda _: moved / pieces.memmove(order),
        plan.rounds(9),
    )  # fmt: skip
    copies = [copied for _, copied in pairs]
    return [
        Row.of_values(names[0], f"memmove, pieces of {size}", copies, "GB/s"),
        Row.of_pairs(names[1], f"xxh3-128 alone, pieces of {size}", pairs, "GB/s", "memmove"),
    ]


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("Memory of this machine", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    sys.exit(main())
