"""Sums of many pages in one call, copied or not: checksum.payload_sum, by every implementation."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvtier.core.page import Codec
from kvtier.errors import KeyLengthError
from kvtier.packing import bulk_sums
from kvtier.packing.bulk_sums import CompiledSummer, Summer, XxhashSummer, load_summer
from kvtier.packing.checksum import bound_blocks, payload_sum
from tests.seeds import seeds

LENGTHS = [1, 16, 17, 128, 129, 240, 241, 255, 256, 1023, 1024, 1025, 1088, 4096, 65_537]
#: From here on the target is written past the caches, in one way for each place in a line.
LENGTHS += [(1 << 20) + more for more in (-1024, 0, 16, 65, 1000)]
NAMED = {
    "fingerprint": bytes(range(100, 132)),
    "namespace_generation": 0x0102030405060708,
    "shard": 7,
    "codec": Codec.FP8,
}


@pytest.fixture(params=["numba", "xxhash"])
def summer(request: pytest.FixtureRequest) -> Summer:
    if request.param == "xxhash":
        return XxhashSummer()
    pytest.importorskip("numba")
    found = load_summer()
    assert isinstance(found, CompiledSummer)
    return found


def keys_of(count: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in range(count)]


def addresses(array: np.ndarray, starts: list[int]) -> np.ndarray:
    return np.array([array.ctypes.data + start for start in starts], np.int64)


@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("skew", [0, 1, 8, 16, 32, 48, 63])
def test_sums_and_copies(summer: Summer, nbytes: int, skew: int) -> None:
    """Wherever pages lie: the sum of each, its bytes at the target and nothing beside it."""
    count = 3
    step = nbytes + 128 - nbytes % 64
    source = np.random.default_rng(nbytes).integers(0, 256, count * step + 64, np.uint8)
    target = np.full(count * step + 128, 0xEE, np.uint8)
    aligned = -target.ctypes.data % 64
    from_ = [number * step + skew for number in range(count)]
    to = [aligned + number * step + skew for number in (2, 0, 1)]
    keys = keys_of(count)
    expected = [
        payload_sum(source[at : at + nbytes].data, key=key, length=nbytes, **NAMED)
        for at, key in zip(from_, keys, strict=True)
    ]
    blocks = bound_blocks(keys, length=nbytes, **NAMED)
    made = summer.sums(addresses(source, from_), nbytes, blocks)
    assert [row.tobytes() for row in made] == expected
    blocks = bound_blocks(keys, length=nbytes, **NAMED)
    made = summer.copy(addresses(source, from_), addresses(target, to), nbytes, blocks)
    assert [row.tobytes() for row in made] == expected
    untouched = np.ones(len(target), np.bool_)
    for at, place in zip(from_, to, strict=True):
        assert np.array_equal(target[place : place + nbytes], source[at : at + nbytes])
        untouched[place : place + nbytes] = False
    assert (target[untouched] == 0xEE).all()


def test_no_pages(summer: Summer) -> None:
    nothing = np.empty(0, np.int64)
    assert len(summer.copy(nothing, nothing, 4096, bound_blocks([], length=4096, **NAMED))) == 0


@pytest.mark.parametrize("seed", seeds(5, of=20))
def test_one_flipped_bit_is_another_sum(summer: Summer, seed: int) -> None:
    rng = random.Random(seed)
    nbytes = rng.choice([241, 1000, 1024, 5000, 70_000])
    page = np.frombuffer(bytearray(rng.randbytes(nbytes)), np.uint8)
    key = keys_of(1)
    before = summer.sums(addresses(page, [0]), nbytes, bound_blocks(key, length=nbytes, **NAMED))
    page[rng.randrange(nbytes)] ^= 1 << rng.randrange(8)
    after = summer.sums(addresses(page, [0]), nbytes, bound_blocks(key, length=nbytes, **NAMED))
    assert before.tobytes() != after.tobytes(), f"seed {seed}"


@pytest.mark.parametrize("name", ["fingerprint", "namespace_generation", "shard", "codec", "key"])
def test_the_sum_is_bound_to_every_name(summer: Summer, name: str) -> None:
    page = np.zeros(4096, np.uint8)
    others = {
        "fingerprint": bytes(32),
        "namespace_generation": 1,
        "shard": 8,
        "codec": Codec.RAW,
    }
    keys, named = keys_of(1), dict(NAMED)
    if name == "key":
        keys = [bytes([9]) * 32]
    else:
        named[name] = others[name]
    made = [
        summer.sums(addresses(page, [0]), 4096, bound_blocks(k, length=4096, **n)).tobytes()
        for k, n in ((keys_of(1), NAMED), (keys, named))
    ]
    assert made[0] != made[1]


@pytest.mark.parametrize("skew", [0, 16])
@pytest.mark.parametrize("nbytes", [16_384, 160 << 10])
def test_what_is_copied_is_what_is_summed(summer: Summer, nbytes: int, skew: int) -> None:
    """The source is written to all the time: a target always has the sum that was given for it."""
    count = 8
    source = np.zeros(count * nbytes, np.uint8)
    target = np.zeros(count * nbytes + 128, np.uint8)
    starts = [number * nbytes for number in range(count)]
    aligned = -target.ctypes.data % 64 + skew
    is_over = threading.Event()

    def scribble() -> None:
        words = source.view(np.uint64)
        value = 0
        while not is_over.is_set():
            value += 1
            words[:] = value

    writer = threading.Thread(target=scribble)
    writer.start()
    wrong = 0
    try:
        for _ in range(300):
            blocks = bound_blocks(keys_of(count), length=nbytes, **NAMED)
            to = addresses(target, [aligned + start for start in starts])
            made = summer.copy(addresses(source, starts), to, nbytes, blocks)
            for number, key in enumerate(keys_of(count)):
                at = aligned + starts[number]
                bound = payload_sum(target[at : at + nbytes].data, key=key, length=nbytes, **NAMED)
                wrong += made[number].tobytes() != bound
    finally:
        is_over.set()
        writer.join()
    assert wrong == 0


def test_keys_of_another_length_are_refused() -> None:
    with pytest.raises(KeyLengthError):
        bound_blocks([bytes(31)], length=1, **NAMED)


def test_without_numba_it_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"no module named {name}")

    monkeypatch.setattr(bulk_sums, "load_optional", refuse)
    load_summer.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert load_summer().name == load_summer().name == "xxhash"
        assert [record.event for record in caplog.records] == ["sums.fallback"]
    finally:
        load_summer.cache_clear()


def test_it_is_loaded_when_it_is_needed_and_not_before() -> None:
    code = (
        "import sys, kvtier.packing.bulk_sums as b; assert 'numba' not in sys.modules;"
        "print(b.load_summer().name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("numba", "xxhash")
    assert len(done.stderr) == 0


def test_compiled_code_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        CompiledSummer, "sums", lambda *_: np.zeros((1, 16), np.uint8), raising=True
    )
    load_summer.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert load_summer().name == "xxhash"
        assert [record.event for record in caplog.records] == ["sums.fallback"]
    finally:
        load_summer.cache_clear()
