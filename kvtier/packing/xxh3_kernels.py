"""XXH3-128 compiled for this processor, over many pages in one call, copying in the same pass.

Promise: the digests of xxhash.xxh3_128_digest, for lengths over SHORT_MAX. What is stored is what
is summed: it goes from one register to both. (The last 64 bytes, where they overlap those before,
are stored and summed twice, as the algorithm has it; if they changed in between, the digest belongs
to no bytes at all.) The algorithm is that of the XXH3 specification (default secret, seed
0); a lane of its accumulator is a lane of a vector here, of the widest kind the processor has.

A library's digest reads memory that a copy has just written, which costs as much as the copy where
the page is larger than the caches. Stores of long pages go past the caches (STREAM), so that the
target is not read first. Such stores are of whole lines of 64 bytes: where the target begins in the
middle of one, each is put together from the end of one stripe and the beginning of the next.

Importing this needs numba, and compiles or takes what an earlier process compiled from numba's
cache. The kernel runs without the interpreter lock and trusts its arguments: bulk_sums.py is the
one caller.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types

from kvtier.packing.jit_numba import compiled, emit_prefetch, instructions, part

__all__ = ["COPY", "ONLY_SUM", "SHORT_MAX", "STREAM", "sum_pages"]

#: Up to so many bytes XXH3 is another algorithm.
SHORT_MAX: Final = 240

#: What is done with the bytes beside summing them.
ONLY_SUM: Final = 0
COPY: Final = 1
#: As COPY, and past the caches where targets are at multiples of 16 (numpy's arrays are, torch's
#: are at ones of 64).
STREAM: Final = 2

# Constants of the specification.
_SECRET: Final = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint64,
)
_PRIME32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_START: Final = np.array(
    [_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0]], np.uint64
)
_P32_1 = np.uint64(_PRIME32[0])
_P1, _P2, _P4 = (np.uint64(_PRIME64[number]) for number in (0, 1, 3))
_AVALANCHE = np.uint64(0x165667919E3779F9)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_S37, _S47 = np.uint64(37), np.uint64(47)

_STRIPE: Final = 64
_STRIPES_PER_BLOCK: Final = 16
_BLOCK: Final = _STRIPE * _STRIPES_PER_BLOCK
#: How far before its use a stripe is fetched: the processor does not look into the next 4 KiB by
#: itself.
_AHEAD: Final = 4096
#: Where in the secret its parts for these steps begin, in bytes.
_SCRAMBLE_AT, _LAST_AT, _LOW_AT, _HIGH_AT = 128, 121, 11, 117

_WORD, _INT = ir.IntType(64), ir.IntType(32)
_LINE = ir.VectorType(_WORD, 8)


def _stripes(mode: int, skew: int = 0) -> Any:
    """A loop over 64-byte stripes: (accumulator, source, target, secret: addresses; how many).

    The last stripe is kept behind the accumulator. With STREAM the target lies `skew` words behind
    a multiple of 64: lines are stored from the one that the stripe before this loop began, to the
    one that its last stripe ends; what is left of that one is the caller's.
    """

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        accumulator, source, target, secret, count = args
        before, function = builder.block, builder.function
        loop = function.append_basic_block("stripe")
        done = function.append_basic_block("stripes_done")
        kept = _pointer(builder, accumulator)
        stripe_kept = _pointer(builder, builder.add(accumulator, _number(_STRIPE)))
        first, stripe_before = _loaded(builder, kept, 8), _loaded(builder, stripe_kept, 8)
        builder.cbranch(builder.icmp_signed(">", count, _number(0)), loop, done)
        builder.position_at_end(loop)
        at, lanes, previous = builder.phi(_WORD), builder.phi(_LINE), builder.phi(_LINE)
        offset = builder.shl(at, _number(6))
        stripe = builder.add(source, offset)
        emit_prefetch(builder, builder.add(stripe, _number(_AHEAD)))
        data = _loaded(builder, _pointer(builder, stripe), 1)
        if mode != ONLY_SUM:
            place = builder.add(target, offset)
            if skew:
                line = ir.Constant(ir.VectorType(_INT, 8), list(range(8 - skew, 16 - skew)))
                whole = builder.shuffle_vector(previous, data, line)
                _store(builder, whole, builder.sub(place, _number(8 * skew)), mode)
            else:
                _store(builder, data, place, mode)
        key = builder.add(secret, builder.shl(at, _number(3)))
        mixed = _mixed(builder, data, _loaded(builder, _pointer(builder, key), 1))
        added, following = builder.add(lanes, mixed), builder.add(at, _number(1))
        builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
        builder.position_at_end(done)
        last, stripe_last = builder.phi(_LINE), builder.phi(_LINE)
        for phi, entering, staying in (
            (at, _number(0), following),
            (lanes, first, added),
            (previous, stripe_before, data),
            (last, first, added),
            (stripe_last, stripe_before, data),
        ):
            phi.add_incoming(entering, before)
            phi.add_incoming(staying, loop)
        builder.store(last, kept).align = 8
        builder.store(stripe_last, stripe_kept).align = 8
        return _context.get_dummy_value()

    def typed(
        typing: Any, accumulator: Any, source: Any, target: Any, secret: Any, count: Any
    ) -> Any:
        return types.void(*[types.int64] * 5), emit

    return instructions(typed)


def _mixed(builder: Any, data: Any, key: Any) -> Any:
    """What one stripe adds to the accumulator."""
    keyed = builder.xor(data, key)
    low = builder.and_(keyed, _line(int(_LOW)))
    product = builder.mul(low, builder.lshr(keyed, _line(32)))
    neighbours = ir.Constant(ir.VectorType(_INT, 8), [1, 0, 3, 2, 5, 4, 7, 6])
    return builder.add(product, builder.shuffle_vector(data, data, neighbours))


def _store(builder: Any, data: Any, address: Any, mode: int) -> None:
    stored = builder.store(data, _pointer(builder, address))
    stored.align = 64 if mode == STREAM else 1
    if mode == STREAM:
        one = builder.module.add_metadata([ir.Constant(_INT, 1)])
        stored.set_metadata("nontemporal", one)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _LINE.as_pointer())


def _loaded(builder: Any, pointer: Any, align: int) -> Any:
    loaded = builder.load(pointer)
    loaded.align = align
    return loaded


def _number(value: int) -> Any:
    return ir.Constant(_WORD, value)


def _line(value: int) -> Any:
    return ir.Constant(_LINE, [value] * 8)


_only_sum, _copy, _stream = (_stripes(mode) for mode in (ONLY_SUM, COPY, STREAM))
_stream_2, _stream_4, _stream_6 = (_stripes(STREAM, skew) for skew in (2, 4, 6))


@instructions
def _put_line(typing: Any, source: Any, target: Any) -> Any:
    """Copies 64 bytes of our own to any address."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        line = _loaded(builder, _pointer(builder, args[0]), 8)
        _store(builder, line, args[1], COPY)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@instructions
def _word(typing: Any, address: Any) -> Any:
    """The uint64 at any address."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _loaded(builder, builder.inttoptr(args[0], _WORD.as_pointer()), 1)

    return types.uint64(types.int64), emit


@instructions
def _fence(typing: Any) -> Any:
    """What was stored past the caches is there before what is stored later."""

    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@part
def _fold(a: Any, b: Any) -> Any:
    """The two halves of the 128-bit product, one upon the other."""
    low_a, high_a, low_b, high_b = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    low = low_a * low_b
    first = high_a * low_b
    cross = (low >> _HALF) + (first & _LOW) + low_a * high_b
    high = (first >> _HALF) + (cross >> _HALF) + high_a * high_b
    return high ^ ((cross << _HALF) | (low & _LOW))


@part
def _avalanche(value: Any) -> Any:
    value ^= value >> _S37
    value *= _AVALANCHE
    return value ^ (value >> _HALF)


@part
def _merged(lanes: Any, secret: Any, start: Any) -> Any:
    for pair in range(4):
        at = secret + 16 * pair
        start += _fold(lanes[2 * pair] ^ _word(at), lanes[2 * pair + 1] ^ _word(at + 8))
    return _avalanche(start)


@part
def _short_mixed(low: Any, high: Any, first: Any, second: Any, secret: Any) -> Any:
    """One round over two times 16 bytes of an input of up to 128."""
    a, b, c, d = _word(first), _word(first + 8), _word(second), _word(second + 8)
    low = (low + _fold(a ^ _word(secret), b ^ _word(secret + 8))) ^ (c + d)
    high = (high + _fold(c ^ _word(secret + 16), d ^ _word(secret + 24))) ^ (a + b)
    return low, high


@part
def _digest_of_128(block: Any, secret: Any) -> Any:
    """(high, low) of the digest of 128 bytes."""
    low, high = np.uint64(128) * _P1, np.uint64(0)
    for step in range(3, -1, -1):
        low, high = _short_mixed(
            low, high, block + 16 * step, block + 112 - 16 * step, secret + 32 * step
        )
    mixed = low * _P1 + high * _P4 + np.uint64(128) * _P2
    return np.uint64(0) - _avalanche(mixed), _avalanche(low + high)


@part
def _swapped(value: Any) -> Any:
    """Bytes in the other order: a canonical digest is big-endian."""
    eights, sixteens = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
    value = ((value & eights) << np.uint64(8)) | ((value >> np.uint64(8)) & eights)
    value = ((value & sixteens) << np.uint64(16)) | ((value >> np.uint64(16)) & sixteens)
    return (value << _HALF) | (value >> _HALF)


@part
def _add_stripes(mode: Any, skew: Any, at: Any, source: Any, target: Any, count: Any) -> None:
    """Sums stripes up, and does with them what `mode` says."""
    secret = _SECRET.ctypes.data
    if mode == ONLY_SUM:
        _only_sum(at, source, 0, secret, count)
    elif mode == COPY:
        _copy(at, source, target, secret, count)
    elif skew == 0:
        _stream(at, source, target, secret, count)
    elif skew == 2:
        _stream_2(at, source, target, secret, count)
    elif skew == 4:
        _stream_4(at, source, target, secret, count)
    else:
        _stream_6(at, source, target, secret, count)


@compiled("void(int64[::1],int64[::1],int64,int64,uint64[:,::1],int64,uint64[:,::1])")
def sum_pages(
    sources: Any, targets: Any, nbytes: Any, mode: Any, blocks: Any, digest_word: Any, sums: Any
) -> None:
    """For each page: copies it as `mode` says, puts its digest (16 bytes) into its row of `blocks`
    (n, 16 words) at `digest_word`, and the digest of that row into `sums` (n, 2 words).
    """
    lanes = np.empty(16, np.uint64)  # and the last stripe
    at, secret = lanes.ctypes.data, _SECRET.ctypes.data
    length = np.uint64(nbytes)
    whole = (nbytes - 1) // _BLOCK
    left = (nbytes - 1 - whole * _BLOCK) // _STRIPE
    for page in range(len(sources)):
        source, target = sources[page], targets[page]
        skew = (target & 63) >> 3
        page_mode = COPY if mode == STREAM and target & 15 else mode
        lanes[:8] = _START
        for block in range(whole + 1):
            begin = block * _BLOCK
            count = _STRIPES_PER_BLOCK if block < whole else left
            way = page_mode
            if skew and way == STREAM and (block == 0 or block == whole):
                # A line that other memory shares, or that no further stripe ends.
                way = COPY
                if block > 0:
                    _put_line(at + _STRIPE, target + begin - _STRIPE)
            _add_stripes(way, skew, at, source + begin, target + begin, count)
            if block < whole:
                for lane in range(8):
                    value = lanes[lane]
                    value ^= value >> _S47
                    value ^= _word(secret + _SCRAMBLE_AT + 8 * lane)
                    lanes[lane] = value * _P32_1
        # The last 64 bytes once more, whatever was done with them before.
        last = nbytes - _STRIPE
        if mode == ONLY_SUM:
            _only_sum(at, source + last, 0, secret + _LAST_AT, 1)
        else:
            _copy(at, source + last, target + last, secret + _LAST_AT, 1)
        blocks[page, digest_word] = _swapped(_merged(lanes, secret + _HIGH_AT, ~(length * _P2)))
        blocks[page, digest_word + 1] = _swapped(_merged(lanes, secret + _LOW_AT, length * _P1))
        high, low = _digest_of_128(blocks.ctypes.data + 128 * page, secret)
        sums[page, 0], sums[page, 1] = _swapped(high), _swapped(low)
    if mode == STREAM:
        _fence()
