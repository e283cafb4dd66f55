"""Chooses the implementation of the directory's inner loops, in this one place.

The compiled one needs numba (extra `fast`) and is 30 to 100 times faster; the other needs numpy
alone. Nothing is loaded before the first directory or view is made. Compiled code may come from a
cache that an older version has left, so it has to do as numpy does before it is used.

Thread rule: any thread.
"""

from __future__ import annotations

import logging
from functools import cache

import numpy as np

from kvtier.packing.optional_code import load_optional
from kvtier.transfer.local.entry import ENTRY_WORDS, Words
from kvtier.transfer.local.header import OPEN_WORD, header_for
from kvtier.transfer.local.mapped import MappedTable
from kvtier.transfer.local.protocol import Found, Kernels
from kvtier.transfer.local.vectors import NumpyKernels

__all__ = ["agrees", "load_compiled", "load_kernels"]

log = logging.getLogger(__name__)


@cache
def load_kernels() -> Kernels:
    """The fastest implementation that is installed and sound; the same one each time."""
    try:
        compiled = load_compiled()
    except ModuleNotFoundError:
        words = "no numba: the directory is searched by numpy, which is slower"
        log.info(words, extra={"event": "local.kernels.numpy"})
        return NumpyKernels()
    except ImportError as error:
        # An installation that does not fit this Python or numpy.
        log.warning(
            "numba cannot be used, the directory is searched by numpy, which is slower (%s)",
            str(error),
            extra={"event": "local.kernels.no_numba", "reason": str(error)},
        )
        return NumpyKernels()
    if not agrees(compiled):
        remedy = "delete numba's cache files (*.nbi, *.nbc) of kvtier, and restart"
        log.warning(
            "the directory's compiled loops do not do what numpy does and are not used; %s",
            remedy,
            extra={"event": "local.kernels.stale_cache", "remedy": remedy},
        )
        return NumpyKernels()
    return compiled


def load_compiled() -> Kernels:
    """The compiled implementation, unchecked. Raises ImportError without numba."""
    # Not imported before it is used: numba takes half a second, which connecting must not.
    made: Kernels = load_optional("kvtier.transfer.local.compiled").CompiledKernels()
    return made


def agrees(kernels: Kernels) -> bool:
    """Whether `kernels` do to a small table what numpy does, word for word. Takes a millisecond."""
    ours, theirs = _trace(kernels), _trace(NumpyKernels())
    return all(np.array_equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def _trace(kernels: Kernels) -> list[Words]:
    """Everything that writes, removals and searches leave behind."""
    header = header_for(pages_max=16, namespaces_max=1, boot_id=(3 << 64) | 7, hash_seed=11)
    table = MappedTable.over(bytearray(header.file_bytes), header)
    table.words[OPEN_WORD] = 1
    rows = np.arange(20 * ENTRY_WORDS, dtype=np.uint64).reshape(-1, ENTRY_WORDS)
    rows *= np.uint64(0x9E3779B97F4A7C15)
    rows[:, 4] &= np.uint64((1 << 56) - 1 - 0xFFFF_FFFF_FFFF)
    rows[:, 4] |= np.uint64((1 << 56) + 5)
    placed, removed = np.zeros(20, np.uint8), np.zeros(20, np.uint8)
    counts = list(kernels.write(table, rows, placed, 16))
    counts += kernels.remove(table, rows[::3].copy(), removed[:7])
    found = Found.room_for(20)
    keys = np.ascontiguousarray(rows[:, :4]).reshape(-1)
    counts += kernels.probe(table, keys, 5, found)
    exact = Found.room_for(20, with_entries=False, is_exact=True)
    counts += kernels.probe(table, keys, 5, exact)
    state, torn, answers = kernels.answer(table, keys.tobytes(), 5, 3 << 32 | 1, is_exact=True)
    readable = kernels.readable(
        found, rows[0].copy(), arena_bytes=1 << 62, length=int(found.lengths[0]), lossy_ok=True
    )
    counts += [state, torn, len(readable.rows)]
    same = found.hits.view(np.uint8).copy()
    kernels.recheck(table, found, same)
    answered = np.frombuffer(answers, np.uint8)
    codes = np.concatenate(
        [placed, removed, found.codes, found.tiers, exact.codes, exact.tiers, same, answered]
    )
    return [table.words, found.words, codes.astype(np.uint64), np.array(counts, np.uint64)]
