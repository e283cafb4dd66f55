"""The fp8 formula compiled for the CPU: numbers to codes and scales, and back.

Promise: the bytes of kvtier/packing/fp8_torch.py. Each float operation is one float32 operation,
correctly rounded: what is done to one number is written in LLVM's instructions, whose `fmul` and
`fadd` without flags are neither contracted nor reordered, and rounding to shorter formats is done
on bits. (In numba's Python a sum of two uint32 has 64 bits, and every cast back costs compile
time.) A thread that flushes subnormals to zero (torch.set_flush_denormal) gets other bits here, as
it does there.

A number of a segment is a word, its bits. Numba picks the code by the type, and numpy has no
bfloat16: a uint16 is a bfloat16, an int16 a float16, a uint32 a float32.

Importing this module compiles it, or takes what an earlier process compiled from numba's cache,
which lies beside this file or, where that cannot be written, in the user's cache folder. All of it
is in one file because the cache looks at this file alone to find out whether it is stale. The two
kernels run without the interpreter lock, hold no state, and trust their arguments:
kvtier/packing/fp8_numba.py is the one caller.

How a page is walked: axes along which the scale changes (L, H) and others (T, D) alternate. `walk`
is (chunks, steps, outer, inner, across). A chunk is `steps` blocks in a row, each of the shape
(outer, inner, across); scales differ between chunks, along outer and along across, and are numbered
in that order. Where `inner` is long the loops run along it with one scale in hand (rows); else over
whole blocks, with a scale a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
from llvmlite import ir
from numba import types

from kvtier.packing.jit_numba import compiled, instructions

__all__ = ["pack_span", "unpack_span"]

Function = TypeVar("Function", bound=Callable[..., Any])

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
#: What infinity is in each type of word.
_INFINITY: Final = {types.uint16: 0x7F80, types.int16: 0x7C00, types.uint32: 0x7F800000}
#: Shorter rows than this are better walked as blocks.
_ROW_MIN: Final = 32
_LINE_BYTES: Final = 64


def _compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """For each type of word."""
    return compiled([signature.format(word) for word in _INFINITY])


# -- one number ------------------------------------------------------------------------------------


class _Steps:
    """Instructions on values of 32 bits, with the constants written as numbers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def bits(self, value: Any) -> Any:
        return self.builder.bitcast(value, _I32)

    def real(self, bits: Any) -> Any:
        return self.builder.bitcast(bits, _F32)

    def wide(self, value: Any) -> Any:
        return value if value.type == _I32 else self.builder.zext(value, _I32)

    def mask(self, value: Any, mask: int) -> Any:
        return self.builder.and_(value, value.type(mask))

    def left(self, value: Any, places: int) -> Any:
        return self.builder.shl(value, _I32(places))

    def right(self, value: Any, places: int) -> Any:
        return self.builder.lshr(value, _I32(places))

    def plus(self, value: Any, number: int) -> Any:
        return self.builder.add(value, _I32(number & 0xFFFFFFFF))

    def times(self, value: Any, number: float) -> Any:
        return self.builder.fmul(value, _F32(number))

    def at_least(self, value: Any, bound: int) -> Any:
        return self.builder.icmp_unsigned(">=", value, _I32(bound))

    def choose(self, condition: Any, yes: Any, no: Any) -> Any:
        return self.builder.select(condition, yes, no)

    def either(self, value: Any, other: Any) -> Any:
        return self.builder.or_(value, other)

    def rounded(self, bits: Any, places: int) -> Any:
        """Without the last `places`, to nearest, ties to even; a carry goes up the exponent."""
        odd = self.mask(self.right(bits, places), 1)
        half = self.plus(bits, (1 << (places - 1)) - 1)
        return self.right(self.builder.add(half, odd), places)

    def counted(self, size: Any, unit: float, bits: int) -> Any:
        """How many units a small float is: the last place of `unit` is one; `bits` are its bits."""
        return self.plus(self.bits(self.builder.fadd(self.real(size), _F32(unit))), -bits)

    def count(self, size: Any, unit: float) -> Any:
        """The bits of `size` units, exactly."""
        return self.bits(self.times(self.builder.uitofp(size, _F32), unit))


@instructions
def _encode(typing_context: Any, value: Any) -> Any:
    """The e4m3fn code of a float32 that is less than 464, where the codes end: what is over 448
    becomes 448. No number times its inverse scale is more than 448 by more than a few roundings.

    To add 2^20 times the power of two below a number rounds it to what its code can say, to
    nearest, ties to even; the code counts these units. Below 2^-6 the unit is that of 2^-6.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = _Steps(builder)
        bits = do.bits(arguments[0])
        power = do.mask(bits, 0x7F800000)
        power = do.choose(do.at_least(power, 121 << 23), power, _I32(121 << 23))  # 2^-6
        unit = do.plus(power, 20 << 23)
        rounded = builder.fadd(do.real(do.mask(bits, 0x7FFFFFFF)), do.real(unit))
        counted = builder.sub(do.bits(rounded), unit)
        # Eight codes a power of two, the first of which its own eight units stand for.
        made = do.plus(builder.add(counted, do.right(unit, 20)), -((121 + 20) << 3))
        return builder.trunc(do.either(made, do.mask(do.right(bits, 24), 0x80)), _I8)

    return types.uint8(types.float32), code


@instructions
def _decode(typing_context: Any, byte: Any) -> Any:
    """The float32 of a code that is not NaN, exactly."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = _Steps(builder)
        given = do.wide(arguments[0])
        size = do.mask(given, 0x7F)
        normal = do.plus(do.left(size, 20), 120 << 23)
        bits = do.choose(do.at_least(size, 8), normal, do.count(size, 2.0**-9))
        return do.real(do.either(bits, do.left(do.mask(given, 0x80), 24)))

    return types.float32(types.uint8), code


@instructions
def _drop_sign(typing_context: Any, word: Any) -> Any:
    """The word without its sign."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _Steps(builder).mask(arguments[0], (1 << (word.bitwidth - 1)) - 1)

    return word(word), code


@instructions
def _is_finite(typing_context: Any, word: Any) -> Any:
    """Of a word without its sign."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        size = arguments[0]
        return builder.icmp_unsigned("<", size, size.type(_INFINITY[word]))

    return types.boolean(word), code


@instructions
def _widen(typing_context: Any, word: Any) -> Any:
    """The number as float32, exactly."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = _Steps(builder)
        given = do.wide(arguments[0])
        if word == types.uint32:
            return do.real(given)
        if word == types.uint16:
            return do.real(do.left(given, 16))
        size = do.mask(given, 0x7FFF)
        normal = do.plus(do.left(size, 13), 112 << 23)  # bias 127 for 15
        bits = do.choose(do.at_least(size, 0x400), normal, do.count(size, 2.0**-24))
        return do.real(do.either(bits, do.left(do.mask(given, 0x8000), 16)))

    return types.float32(word), code


@instructions
def _narrow(typing_context: Any, value: Any, like: Any) -> Any:
    """A float32, rounded, as a word of the type of `like`. A float16 must not leave its format,
    which `check_scales` sees to.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        do = _Steps(builder)
        bits = do.bits(arguments[0])
        if like == types.uint32:
            return bits
        if like == types.uint16:
            return builder.trunc(do.rounded(bits, 16), _I16)
        size = do.mask(bits, 0x7FFFFFFF)
        normal = do.plus(do.rounded(size, 13), -(112 << 10))
        small = do.counted(size, 0.5, 0x3F000000)  # below 2^-14 numbers count 2^-24
        word = do.choose(do.at_least(size, 0x38800000), normal, small)
        return builder.trunc(do.either(word, do.mask(do.right(bits, 16), 0x8000)), _I16)

    return like(types.float32, like), code


@instructions
def _prefetch(typing_context: Any, words: Any, index: Any) -> Any:
    """Asks for the memory of a word that will be read soon."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(words)(context, builder, arguments[0])
        pointer = _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), pointer)
        builder.call(fetch, [place, _I32(0), _I32(2), _I32(1)])  # to read, into L2, data
        return context.get_dummy_value()

    return types.void(words, types.int64), code


# -- a span ----------------------------------------------------------------------------------------
# No helper functions below: each would be compiled, and optimised, once more.


@_compiled("b1(Array({}, 1, 'C', readonly=True), u1[::1], f4[::1], UniTuple(i8, 5))")
def pack_span(words: Any, codes: Any, scales: Any, walk: Any) -> Any:
    """Whether all `words` are finite; if so, `codes` and `scales` are filled."""
    chunks, steps, outer, inner, across = walk
    is_rows = across == 1 and inner >= _ROW_MIN
    rows, length = (outer, inner) if is_rows else (1, outer * inner * across)
    # An entry a scale for rows; for blocks an entry a number, and a scale takes the most of its.
    sizes = np.empty(outer if is_rows else length, words.dtype)
    inverses = np.empty(sizes.size, np.float32)
    for chunk in range(chunks):
        sizes[:] = 0
        first = chunk * steps * rows * length
        for step in range(steps):
            for row in range(rows):
                start = first + (step * rows + row) * length
                part = words[start : start + length]
                if is_rows:
                    most = sizes[row]
                    for i in range(part.size):
                        most = max(most, _drop_sign(part[i]))
                    sizes[row] = most
                else:
                    for i in range(part.size):
                        sizes[i] = max(sizes[i], _drop_sign(part[i]))
        for number in range(outer * across):
            place = number if is_rows else number // across * inner * across + number % across
            count = 1 if is_rows else inner
            most = sizes[place]
            for i in range(count):
                most = max(most, sizes[place + i * across])
            if not _is_finite(most):
                return False
            scale = np.float32(1)
            if most != 0:
                scale = max(np.float32(_widen(most) / np.float32(448)), np.float32(2.0**-126))
            scales[chunk * outer * across + number] = scale
            for i in range(count):
                inverses[place + i * across] = np.float32(np.float32(1) / scale)
        for step in range(steps):
            for row in range(rows):
                start = first + (step * rows + row) * length
                part, target = words[start : start + length], codes[start : start + length]
                # The next chunk comes from memory while the processor is busy with this one.
                ahead = start + steps * rows * length
                if ahead + length <= words.size:
                    for i in range(0, length, _LINE_BYTES // words.itemsize):
                        _prefetch(words, ahead + i)
                if is_rows:
                    inverse = inverses[row]
                    for i in range(part.size):
                        target[i] = _encode(_widen(part[i]) * inverse)
                else:
                    for i in range(part.size):
                        target[i] = _encode(_widen(part[i]) * inverses[i])
    return True


@_compiled(
    "b1(Array(u1, 1, 'C', readonly=True), {}[::1], Array(f4, 1, 'C', readonly=True), "
    "UniTuple(i8, 5))"
)
def unpack_span(codes: Any, words: Any, scales: Any, walk: Any) -> Any:
    """Whether no code stands for NaN; if so, `words` are filled."""
    chunks, steps, outer, inner, across = walk
    worst = np.uint8(0)
    for i in range(codes.size):
        worst = max(worst, np.uint8(codes[i] & np.uint8(0x7F)))
    if worst == np.uint8(0x7F):
        return False
    is_rows = across == 1 and inner >= _ROW_MIN
    rows, length = (outer, inner) if is_rows else (1, outer * inner * across)
    spread = np.empty(0 if is_rows else length, np.float32)
    for chunk in range(chunks):
        first = chunk * steps * rows * length
        if not is_rows:
            for number in range(outer * across):
                place = number // across * inner * across + number % across
                for i in range(inner):
                    spread[place + i * across] = scales[chunk * outer * across + number]
        for step in range(steps):
            for row in range(rows):
                start = first + (step * rows + row) * length
                part, target = codes[start : start + length], words[start : start + length]
                if is_rows:
                    scale = scales[chunk * outer + row]
                    for i in range(part.size):
                        target[i] = _narrow(_decode(part[i]) * scale, target[i])
                else:
                    for i in range(part.size):
                        target[i] = _narrow(_decode(part[i]) * spread[i], target[i])
    return True
