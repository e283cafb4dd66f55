"""The compiled implementation of the directory's inner loops, with types: see protocol.py.

Promise: only arrays that fit each other reach the kernels, which do not check them. Needs numba:
loaded by loading.py alone.

Thread rule: any thread, and in the middle of another call of the same thread (a finalizer, a
handler of a signal); the kernels run without the interpreter lock, while the callers' arrays and
table are held here.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import KEY_BYTES
from kvtier.transfer.local import kernels, owner_kernels
from kvtier.transfer.local.entry import Words
from kvtier.transfer.local.mapped import MappedTable
from kvtier.transfer.local.protocol import ANSWER_KEYS_MAX, Found, Readable

__all__ = ["CompiledKernels"]


class _Room:
    """Memory of one running `answer`: keys, places, codes and tiers."""

    def __init__(self) -> None:
        self._words = np.zeros(ANSWER_KEYS_MAX * 6, np.uint64)
        self.address = int(self._words.ctypes.data)
        self.view = self._words.data.cast("B")


class CompiledKernels:
    """See Kernels."""

    def __init__(self) -> None:
        self._rooms: deque[_Room] = deque()  # that no call uses now

    @property
    def name(self) -> str:
        return "numba"

    def probe(self, table: MappedTable, keys: Words, name: int, found: Found) -> tuple[int, int]:
        assert 4 * len(found.codes) == len(keys), "found is not for these keys"
        into = (found.words, found.places, found.codes, found.tiers)
        torn, doubts = kernels.probe(table.shape, keys, name, found.is_exact, into)
        return torn, doubts

    def answer(
        self, table: MappedTable, keys: bytes, name: int, current: int, *, is_exact: bool
    ) -> tuple[int, int, bytes]:
        count = len(keys) // KEY_BYTES
        if count > ANSWER_KEYS_MAX:
            raise ValueError(f"{count} keys, there is room for {ANSWER_KEYS_MAX}")
        try:
            room = self._rooms.pop()
        except IndexError:
            room = _Room()
        room.view[: len(keys)] = keys
        ended = kernels.answer(table.shape_at, room.address, count, name, current, is_exact)
        begin = (KEY_BYTES + 8) * count
        answers = room.view[begin : begin + 2 * count].tobytes()
        self._rooms.append(room)
        return ended & 3, ended >> 2, answers

    def readable(
        self, found: Found, block: Words, *, arena_bytes: int, length: int, lossy_ok: bool
    ) -> Readable:
        count = len(found.codes)
        assert len(found.words) == 16 * count, "a lookup without entries"
        assert len(block) == 16, "block"
        rows, offsets = np.empty(count, np.int64), np.empty(count, np.int64)
        blocks, sums = np.empty((count, 16), np.uint64), np.empty((count, 2), np.uint64)
        outcomes = np.empty(count, np.uint8)
        into = (rows, offsets, blocks, sums, outcomes)
        taken = kernels.readable(
            found.words, found.codes, block, arena_bytes, length, lossy_ok, into
        )
        if taken < count:
            rows, offsets = rows[:taken], offsets[:taken]
            blocks, sums = blocks[:taken], sums[:taken]
        return Readable(rows, offsets, blocks, sums, outcomes)

    def recheck(self, table: MappedTable, found: Found, same: NDArray[np.uint8]) -> None:
        assert 16 * len(same) == len(found.words), "same is not for these entries"
        kernels.recheck(table.shape, found.words, found.places, same)

    def namespace(self, table: MappedTable, number: int) -> int:
        word: int = kernels.namespace(table.shape, number)
        return word

    def write(
        self, table: MappedTable, rows: Words, placed: NDArray[np.uint8], room: int
    ) -> tuple[int, int, int]:
        assert rows.shape == (len(placed), 16), "rows"
        new, steps, longest = owner_kernels.write(table.shape, rows.reshape(-1), placed, room)
        return new, steps, longest

    def remove(
        self, table: MappedTable, rows: Words, removed: NDArray[np.uint8]
    ) -> tuple[int, int]:
        assert rows.shape == (len(removed), 16), "rows"
        count, steps = owner_kernels.remove(table.shape, rows.reshape(-1), removed)
        return count, steps

    def empty(self, table: MappedTable) -> None:
        owner_kernels.empty(table.shape)

    def store(self, table: MappedTable, word: int, value: int) -> None:
        assert 0 <= word < len(table.words), "word"
        owner_kernels.store(table.shape, word, value)
