"""A get: pages into the caller's memory, verified there, one outcome a key.

Order for each page: bytes in place (or in a scratch buffer, when the place is strided, on a GPU, or
the page is packed) -> compared with the payload sum under the identity that was asked for ->
unpacked and put in place -> counted as a hit. Whatever fails leaves the page not a hit. Unpacking
happens beside the event loop, into private memory; only a call that still lives puts the page in
place. An fp8 page is lossy whatever the daemon says of it.

A Reader belongs to one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.client.buffers import Rows
from kvtier.client.results import GetColumns
from kvtier.client.settings import Verify
from kvtier.core.page import Codec, GetCode, Tier
from kvtier.packing.checksum import verify_payload
from kvtier.packing.layout import Layout
from kvtier.transfer.planes.values import AnnouncedPage, Hints, OpenedNamespace

__all__ = ["SAMPLE_ONE_IN", "GetOptions", "Part", "Reader", "Unpack"]

#: Stored payloads to raw ones, None for one that no packer makes.
Unpack: TypeAlias = Callable[[Codec, list[memoryview]], Awaitable[list[memoryview | None]]]

SAMPLE_ONE_IN: Final = 16

_CODES: Final = frozenset(map(int, GetCode))
_TIERS: Final = frozenset(map(int, Tier))


@dataclass(frozen=True, slots=True, kw_only=True)
class GetOptions:
    """`accept` is what the daemon may send; what arrives in the caller's memory is always raw."""

    accept: tuple[Codec, ...]
    lossy_ok: bool
    hints: Hints


class Reader:
    """The outcomes of one get while they come in. Every key is UNAVAILABLE until it has one."""

    def __init__(
        self, layout: Layout, keys: Sequence[bytes], rows: Rows, *, verify: Verify
    ) -> None:
        self.layout = layout
        self.keys = keys
        self.rows = rows
        self._verify = verify
        self._verified = itertools.count()
        count = len(keys)
        self.codes = bytearray([GetCode.UNAVAILABLE]) * count
        self._tiers = bytearray(count)
        self._codecs = bytearray(count)
        self._lossy = bytearray(count)
        self._boot_ids = [0] * count
        self._slots = np.zeros(count, np.uint64)
        self._generations = np.zeros(count, np.uint64)
        self._scratch: memoryview | None = None

    def scratch(self, codec: Codec) -> memoryview:
        """Memory for one payload. Raw pages are put in place one at a time and share it; packed
        ones wait for the thread that unpacks them.
        """
        if codec is not Codec.RAW:
            return memoryview(bytearray(self.layout.payload_bytes(codec)))
        if self._scratch is None:
            self._scratch = memoryview(bytearray(self.layout.raw_bytes))
        return self._scratch

    def note(self, index: int, page: AnnouncedPage, code: GetCode, boot_id: int) -> None:
        self.codes[index] = code
        if code is GetCode.HIT:
            self._boot_ids[index] = boot_id
            self._tiers[index] = page.tier
            self._codecs[index] = page.codec
            self._lossy[index] = page.lossy
            self._slots[index] = page.slot
            self._generations[index] = page.generation

    def hit(
        self,
        indices: NDArray[np.int64],
        *,
        boot_id: int,
        slots: NDArray[np.uint64],
        generations: NDArray[np.uint64],
        lossy: NDArray[np.uint8],
    ) -> None:
        """Raw pages of host memory that are in place, with a column for each of the rest."""
        self._slots[indices] = slots
        self._generations[indices] = generations
        count = len(self.keys)
        if len(indices) == count:  # they are all different
            self.codes[:] = bytes([GetCode.HIT]) * count
            self._tiers[:] = bytes([Tier.HOST]) * count
            self._codecs[:] = bytes([Codec.RAW]) * count
            self._column(self._lossy)[indices] = lossy
            self._boot_ids = [boot_id] * count
            return
        self._column(self.codes)[indices] = GetCode.HIT
        self._column(self._tiers)[indices] = Tier.HOST
        self._column(self._codecs)[indices] = Codec.RAW
        self._column(self._lossy)[indices] = lossy
        for index in indices.tolist():
            self._boot_ids[index] = boot_id

    def miss(self, indices: NDArray[np.int64]) -> None:
        self._column(self.codes)[indices] = GetCode.MISS

    def time_out(self, indices: NDArray[np.int64]) -> None:
        self._column(self.codes)[indices] = GetCode.TIMEOUT

    @staticmethod
    def _column(values: bytearray) -> NDArray[np.uint8]:
        return np.frombuffer(values, np.uint8)

    def forget(self) -> None:
        """No key has an outcome any more."""
        self.codes[:] = bytes([GetCode.UNAVAILABLE]) * len(self.keys)

    def is_verified(self) -> bool:
        """Whether the next page is to be compared with its sum."""
        if self._verify is Verify.ALWAYS:
            return True
        return self._verify is Verify.SAMPLED and next(self._verified) % SAMPLE_ONE_IN == 0

    def columns(self) -> GetColumns:
        return GetColumns(
            codes=bytes(self.codes),
            tiers=bytes(self._tiers),
            codecs=bytes(self._codecs),
            lossy=bytes(self._lossy),
            boot_ids=self._boot_ids,
            slots=self._slots.tolist(),
            generations=self._generations.tolist(),
        )


class Part:
    """The sink of one call: some of the reader's keys (`indices`), under one handle."""

    def __init__(
        self,
        reader: Reader,
        indices: Sequence[int],
        handle: OpenedNamespace,
        *,
        options: GetOptions,
        unpack: Unpack,
        always_verify: bool = False,
    ) -> None:
        self._unpack = unpack
        self._packed: list[tuple[int, AnnouncedPage, Codec, memoryview]] = []
        self._reader = reader
        self._indices = indices
        self._handle = handle
        self._options = options
        self._always_verify = always_verify
        self._lengths = {codec: reader.layout.payload_bytes(codec) for codec in options.accept}
        self._expected: dict[int, tuple[AnnouncedPage, Codec]] = {}
        self._target: memoryview | None = None
        self._is_in_place = False
        self.answered: set[int] = set()  # indices that have an outcome
        self.failed: list[int] = []  # indices whose bytes came and were not right

    @property
    def count(self) -> int:
        return len(self._indices)

    def announce(self, index: int, page: AnnouncedPage) -> None:
        if page.code != GetCode.HIT:
            code = GetCode(page.code) if page.code in _CODES else GetCode.IO_ERROR
            self._settle(index, page, code)
            return
        codec = next((codec for codec in self._lengths if codec == page.codec), None)
        page = page._replace(lossy=page.lossy or codec is Codec.FP8)
        is_refused = page.lossy and not self._options.lossy_ok
        if codec is None or page.tier not in _TIERS or is_refused:
            # Not what was asked for. Its bytes come all the same and are dropped.
            self._settle(index, page, GetCode.MISS)
        elif page.length != self._lengths[codec]:
            self._settle(index, page, GetCode.CORRUPT)
        else:
            self._expected[index] = (page, codec)

    def begin(self, index: int) -> memoryview | None:
        if index not in self._expected:
            return None
        _, codec = self._expected[index]
        target = None
        if codec is Codec.RAW:
            target = self._reader.rows.direct(self._indices[index])
        self._is_in_place = target is not None
        self._target = self._reader.scratch(codec) if target is None else target
        return self._target

    def complete(self, index: int) -> None:
        if index not in self._expected:
            return
        page, codec = self._expected.pop(index)
        data, self._target = self._target, None
        assert data is not None, "begin came first"
        if not self._is_whole(index, page, codec, data):
            self._fail(index, page)
        elif codec is Codec.RAW:
            self._place(index, page, None if self._is_in_place else data)
        else:
            self._packed.append((index, page, codec, data))

    async def settle(self) -> None:
        packed, self._packed = self._packed, []
        for codec in {codec for _, _, codec, _ in packed}:
            mine = [entry for entry in packed if entry[2] is codec]
            made = await self._unpack(codec, [data for _, _, _, data in mine])
            for (index, page, _, _), raw in zip(mine, made, strict=True):
                if raw is None:
                    # Scales or codes that no packer makes: made wrong, not damaged on the way.
                    self._fail(index, page)
                else:
                    self._place(index, page, raw)

    def _is_whole(self, index: int, page: AnnouncedPage, codec: Codec, data: memoryview) -> bool:
        if not self._always_verify and not self._reader.is_verified():
            return True
        return verify_payload(
            data,
            page.payload_sum,
            key=self._reader.keys[self._indices[index]],
            fingerprint=self._handle.fingerprint,
            namespace_generation=self._handle.generation,
            shard=self._reader.layout.shard.index,
            codec=codec,
            length=page.length,
        )

    def _place(self, index: int, page: AnnouncedPage, raw: memoryview | None) -> None:
        """Puts a verified page where the caller wants it, if it is not there already (None)."""
        if raw is not None:
            self._reader.rows.store(self._indices[index], raw)
        self._settle(index, page, GetCode.HIT)

    def _fail(self, index: int, page: AnnouncedPage) -> None:
        self._settle(index, page, GetCode.CORRUPT)
        self.failed.append(self._indices[index])

    def _settle(self, index: int, page: AnnouncedPage, code: GetCode) -> None:
        self._reader.note(self._indices[index], page, code, self._handle.boot_id)
        self.answered.add(self._indices[index])
