"""Dense attention over an fp8 pool: rows are packed into their pages, runs are unpacked on gather.

A page has one scale for each layer, head and K or V, a power of two: the least with which its
greatest number is no more than the greatest code. So code x scale is exact in bfloat16 and float32,
and reading a page is the same as folding its scales into the scores and the weighted values. A row
that joins a page and is too great for its scale makes the scale grow; codes that are there already
are halved as often, which rounds only those that become subnormal. A page that a whole pass fills
is packed at once, from all of its numbers: its bytes do not depend on who else was computed.

A number that is infinite or NaN makes the scale NaN, and with it all that is read by it: torch's
cast alone would make an infinity the greatest code, which looks like any other.

One thread and stream, as the pool's.
"""

from __future__ import annotations

from typing import Final

import torch

from kvtier.client.device import DevicePool
from kvtier_engine.attention.base import Batch

__all__ = ["Fp8Pages", "power_of_two_scales"]

_CODE_MAX: Final = 448.0
#: The least normal float32, which is that of bfloat16 too.
_SCALE_MIN: Final = 2.0**-126
_MANTISSA: Final = (1 << 23) - 1
_EXPONENT: Final = 0x7F800000
#: A code's bits moved to where bfloat16 has sign, exponent and mantissa: the number times 2^-120.
_BFLOAT16_SHIFT: Final = 4
_BFLOAT16_MASK: Final = 0x87F0 - (1 << 16)
_BFLOAT16_FACTOR: Final = 2.0**120
#: From this scale on its product with the factor is no bfloat16 any more.
_FACTOR_SCALE_MAX: Final = 2.0**7


def power_of_two_scales(greatest: torch.Tensor) -> torch.Tensor:
    """For the greatest absolute numbers (float32): the least powers of two, normal ones, that bring
    them to 448 or less. NaN where one is infinite or NaN.
    """
    wanted = (greatest / _CODE_MAX).clamp_min(_SCALE_MIN)
    rounded_up = (wanted.view(torch.int32) + _MANTISSA) & _EXPONENT
    return torch.where(greatest.isfinite(), rounded_up.view(torch.float32), torch.nan)


class Fp8Pages:
    """Of `pool`, whose layout is an fp8 one; attention computes in `dtype`."""

    def __init__(self, pool: DevicePool, dtype: torch.dtype) -> None:
        self._pool = pool
        self.form = pool.form
        self.dtype = dtype

    def prepare(self, batch: Batch) -> _Fp8Pass:
        return _Fp8Pass(self._pool, self.dtype, batch)


class _Fp8Pass:
    def __init__(self, pool: DevicePool, dtype: torch.dtype, batch: Batch) -> None:
        form = pool.form
        self._pool = pool
        self._dtype = dtype
        self._batch = batch
        self._shape = (form.page_tokens, form.heads, form.dim)
        self._layers = form.layers
        self._run = form.page_tokens * form.heads * form.dim
        #: As bytes: moves of fp8 are not there for every device.
        self._codes = pool.kv.view(torch.uint8)
        # Four codes at a time are gathered faster than single bytes.
        unit = torch.int32 if self._run % 4 == 0 else torch.uint8
        self._wide, self._unit = pool.rows.view(unit), unit.itemsize
        self._tables = batch.tables.reshape(-1)
        # Rows of one page follow each other, and no page has rows of two sequences.
        is_other = batch.pages[1:] != batch.pages[:-1]
        is_first = torch.cat((is_other.new_ones(1), is_other))
        self._touched, first = batch.pages[is_first], batch.offsets[is_first]
        self._places = is_first.cumsum(0) - 1
        #: Pages of which something has been written before this pass: (touched, 1, 1).
        self._are_begun = (first > 0)[:, None, None]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        rows = torch.stack((key, value), dim=1).float()
        scales = self._pool.scales(layer)
        before = torch.where(self._are_begun, scales[self._touched], 0.0)
        after = torch.maximum(power_of_two_scales(self._greatest(rows)), before)
        grown = self._are_begun & (after != before)
        if bool(grown.any()):
            self._shrink_codes(layer, grown.flatten(1).any(1), before / after)
        scales[self._touched] = after
        codes = _codes_of(rows / after[self._places][..., None])
        batch = self._batch
        self._codes[batch.pages, :, layer, batch.offsets] = codes

    def gathered(self, layer: int, part: int) -> torch.Tensor:
        start = (part * self._layers + layer) * self._run // self._unit
        wide = self._wide[:, start : start + self._run // self._unit]
        codes = wide.index_select(0, self._tables)
        scales = self._pool.scales(layer)[self._tables, part]
        return _unpacked(codes, scales, self._dtype, self._shape)

    def _greatest(self, rows: torch.Tensor) -> torch.Tensor:
        """(touched, 2, heads): of the rows that each page gets in this pass."""
        each = rows.abs().amax(dim=-1)
        if len(each) == len(self._touched):
            return each
        zeros = each.new_zeros((len(self._touched), *each.shape[1:]))
        return zeros.scatter_reduce_(0, self._places[:, None, None].expand_as(each), each, "amax")

    def _shrink_codes(self, layer: int, which: torch.Tensor, factors: torch.Tensor) -> None:
        """The codes of these pages, of those touched, times `factors` (touched, 2, heads)."""
        pages = self._touched[which]
        codes = self._codes[pages, :, layer]
        numbers = codes.view(torch.float8_e4m3fn).float() * factors[which][:, :, None, :, None]
        self._codes[pages, :, layer] = _codes_of(numbers)


def _codes_of(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest codes, as bytes."""
    clamped = numbers.clamp(-_CODE_MAX, _CODE_MAX)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8)


def _unpacked(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int, int]
) -> torch.Tensor:
    """(n, *shape) of `dtype`, from n runs of codes and their scales (n, heads)."""
    tokens, heads, dim = shape
    is_small = codes.device.type == "cpu" and dtype is torch.bfloat16
    if is_small and not bool((scales > _FACTOR_SCALE_MAX).any()):
        # Some five times as fast as torch's own cast on a CPU, and the same numbers.
        bits = codes.view(torch.int8).to(torch.int16)
        bits.bitwise_left_shift_(_BFLOAT16_SHIFT).bitwise_and_(_BFLOAT16_MASK)
        numbers = bits.view(torch.bfloat16).view(-1, tokens, heads * dim)
        factors = (scales * _BFLOAT16_FACTOR).to(dtype)[:, None, :, None]
        spread = factors.expand(-1, 1, heads, dim).reshape(-1, 1, heads * dim)
        return numbers.mul_(spread).view(-1, *shape)
    numbers = codes.view(torch.float8_e4m3fn).to(dtype).view(-1, *shape)
    return numbers.mul_(scales.to(dtype)[:, None, :, None])
