"""Payload sums of many pages in one call, with their copy in the same pass where one is wanted.

Promise: the sums of checksum.payload_sum. A sum that a copy is given and that is its maker's means
that the target holds the maker's bytes, whoever writes to the source meanwhile.
Compiled code (numba, extra `fast`) does it at the speed of the copy alone; where it cannot be had,
xxhash does the same page by page, and one warning `sums.fallback` says so. Nothing is loaded before
the first call of `load_summer`, which can take a second.

Addresses are plain numbers: whoever passes them holds the memory until the call has returned. Any
thread; compiled code runs without the interpreter lock.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from types import ModuleType
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.core.page import SUM_BYTES
from kvtier.packing.checksum import DIGEST_WORD
from kvtier.packing.optional_code import load_optional

__all__ = ["Addresses", "Blocks", "CompiledSummer", "Summer", "XxhashSummer", "load_summer"]

log = logging.getLogger(__name__)

Addresses: TypeAlias = NDArray[np.int64]
#: checksum.bound_blocks, shape (n, 16): the digests are filled in.
Blocks: TypeAlias = NDArray[np.uint64]
#: Shape (n, 16).
Sums: TypeAlias = NDArray[np.uint8]

#: From so many bytes on in one call they do not stay in the caches anyway, and go past them.
_STREAM_BYTES_MIN: Final = 1 << 20


class Summer(Protocol):
    """Pages of one length at addresses; every array is of n."""

    @property
    def name(self) -> str:
        """For status and benchmarks."""

    def sums(self, sources: Addresses, nbytes: int, blocks: Blocks) -> Sums:
        """The payload sums."""

    def copy(self, sources: Addresses, targets: Addresses, nbytes: int, blocks: Blocks) -> Sums:
        """The payload sums of what is in the targets when it returns; nothing may overlap.

        Where the length is no multiple of 64, the last bytes are read twice: a source that changes
        in between gives a sum that belongs to no bytes at all.
        """


class XxhashSummer:
    """See Summer."""

    @property
    def name(self) -> str:
        return "xxhash"

    def sums(self, sources: Addresses, nbytes: int, blocks: Blocks) -> Sums:
        made = np.empty((len(sources), SUM_BYTES), np.uint8)
        for page, address in enumerate(sources.tolist()):
            payload = (ctypes.c_char * nbytes).from_address(address)
            digest = np.frombuffer(xxhash.xxh3_128_digest(payload), np.uint64)
            blocks[page, DIGEST_WORD : DIGEST_WORD + 2] = digest
            bound = xxhash.xxh3_128_digest(blocks[page].tobytes())
            made[page] = np.frombuffer(bound, np.uint8)
        return made

    def copy(self, sources: Addresses, targets: Addresses, nbytes: int, blocks: Blocks) -> Sums:
        made = np.empty((len(sources), SUM_BYTES), np.uint8)
        pairs = zip(sources.tolist(), targets.tolist(), strict=True)
        for page, (source, target) in enumerate(pairs):
            ctypes.memmove(target, source, nbytes)
            at = slice(page, page + 1)
            made[at] = self.sums(targets[at], nbytes, blocks[at])
        return made


class CompiledSummer:
    """See Summer. `kernels` is kvtier.packing.xxh3_kernels."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels: Any = kernels
        self._short = XxhashSummer()

    @property
    def name(self) -> str:
        return "numba"

    def sums(self, sources: Addresses, nbytes: int, blocks: Blocks) -> Sums:
        if nbytes <= self._kernels.SHORT_MAX:
            return self._short.sums(sources, nbytes, blocks)
        return self._run(sources, sources, nbytes, self._kernels.ONLY_SUM, blocks)

    def copy(self, sources: Addresses, targets: Addresses, nbytes: int, blocks: Blocks) -> Sums:
        if nbytes <= self._kernels.SHORT_MAX:
            return self._short.copy(sources, targets, nbytes, blocks)
        is_long = nbytes * len(targets) >= _STREAM_BYTES_MIN
        mode = self._kernels.STREAM if is_long else self._kernels.COPY
        return self._run(sources, targets, nbytes, mode, blocks)

    def _run(
        self, sources: Addresses, targets: Addresses, nbytes: int, mode: int, blocks: Blocks
    ) -> Sums:
        made = np.empty((len(sources), SUM_BYTES // 8), np.uint64)
        self._kernels.sum_pages(sources, targets, nbytes, mode, blocks, DIGEST_WORD, made)
        return made.view(np.uint8)


@cache
def load_summer() -> Summer:
    """The fastest that is installed and sound; the same one each time."""
    try:
        compiled = CompiledSummer(load_optional("kvtier.packing.xxh3_kernels"))
    except ImportError as error:
        why, remedy = str(error), "pip install 'kvtier[fast]'"
    else:
        if _agrees(compiled):
            return compiled
        why, remedy = "the compiled sums are wrong", "delete numba's cache files (*.nbi, *.nbc)"
    log.warning(
        "sums of pages are made one by one, which is slower (%s); %s",
        why,
        remedy,
        extra={"event": "sums.fallback", "why": why, "remedy": remedy},
    )
    return XxhashSummer()


def _agrees(summer: Summer) -> bool:
    """Whether it makes the sums of a page as xxhash does: numba's cache may be of other code."""
    page = np.arange(2500, dtype=np.uint64).view(np.uint8)
    source = np.array([page.ctypes.data], np.int64)
    made = [
        each.sums(source, page.nbytes, np.zeros((1, 16), np.uint64)).tobytes()
        for each in (summer, XxhashSummer())
    ]
    return made[0] == made[1]
