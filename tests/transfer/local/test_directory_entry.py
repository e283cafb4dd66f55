"""The bytes of the directory: golden, drawn right in the diagrams, and checked before use."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.page import Codec, PageMeta, PageRef, Tier
from kvtier.errors import DirectoryError, InvalidConfigValue, KeyLengthError, LimitExceeded
from kvtier.packing.record import record_bytes
from kvtier.transfer.local.entry import (
    MIX_FACTORS,
    PLACE_FACTORS,
    encode_entries,
    encode_entry,
    entry_fits,
    identities,
    key_words,
    mix_many,
    mix_seed,
    name_word,
)
from kvtier.transfer.local.header import (
    DIRECTORY_VERSION,
    decode_header,
    encode_header,
    header_for,
    namespace_place,
    namespace_word,
)
from tests.transfer.local.directory_parts import (
    BOOT_ID,
    KERNELS,
    content,
    directory,
    keys_of,
    rows_of,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "directory_v1.hex"
KEY = bytes(range(32))
META = PageMeta(
    key=KEY,
    length=0x1234_5678_9ABC,
    codec=Codec.FP8,
    payload_sum=bytes(range(64, 80)),
    origin_sum=bytes(range(96, 112)),
    lossy=True,
)
REF = PageRef(9, Tier.HOST, 0x0102030405060708, 0x1112131415161718)


def golden_directory(kernels):
    made = directory(5, kernels=kernels)
    made.set_namespace(7, 4)
    made.set_namespace(8, 2)
    other = PageMeta(key=bytes(32), length=1, codec=Codec.RAW, payload_sum=bytes(16))
    made.put_many(
        encode_entries(
            [
                encode_entry(REF, META, namespace=7, shard=3),
                encode_entry(
                    PageRef(9, Tier.NVME, 5, 6), other, namespace=8, shard=0, has_sums=False
                ),
            ]
        )
    )
    return made


def dump(data: bytes) -> str:
    """Blocks of 128 bytes that are not all zeros, by offset."""
    return "".join(
        f"{at:06x} {data[at : at + 128].hex()}\n"
        for at in range(0, len(data), 128)
        if any(data[at : at + 128])
    )


@pytest.mark.parametrize("kernels", KERNELS)
def test_golden_bytes(kernels):
    """Owner and readers can be of two builds: a difference means a new DIRECTORY_VERSION."""
    with golden_directory(kernels) as made:
        assert dump(content(made)) == GOLDEN.read_text()


def test_the_header_diagram_is_right():
    header = header_for(pages_max=5, namespaces_max=300, boot_id=BOOT_ID, hash_seed=77)
    block = encode_header(header)
    offset = 4096 + 2048 * 8
    at = {
        0: b"\x89KVTDIR\n",
        8: struct.pack("<II", DIRECTORY_VERSION, 4096),
        16: BOOT_ID.to_bytes(16, "little"),
        32: struct.pack("<QQQQQ", 16, 77, 2048, offset, offset + 16 * 128),
        72: bytes(48),
        120: struct.pack("<Q", mix(block, BOOT_ID)),
    }
    assert sum(map(len, at.values())) == len(block) == 128
    for place, data in at.items():
        assert block[place : place + len(data)] == data, place
    assert decode_header(block, header.file_bytes) == header


def test_the_entry_diagram_is_right():
    block = encode_entry(REF, META, namespace=0xA1A2A3A4, shard=0xB1B2)
    at = {
        0: KEY,
        32: struct.pack("<IHBB", 0xA1A2A3A4, 0xB1B2, 2, 0x11),
        40: struct.pack("<QQ", REF.generation, REF.slot),
        56: (0x1234_5678_9ABC).to_bytes(6, "little") + bytes([2, 1]),
        64: META.payload_sum + META.origin_sum,
        96: bytes(32),
    }
    assert sum(map(len, at.values())) == len(block) == 128
    for place, data in at.items():
        assert block[place : place + len(data)] == data, place


def mix(block: bytes, boot_id: int) -> int:
    words = np.frombuffer(block, np.uint64).reshape(1, 16)
    return int(mix_many(words, mix_seed(boot_id))[0])


def test_the_factors_are_odd_and_all_different():
    factors = MIX_FACTORS + PLACE_FACTORS
    assert all(factor % 2 for factor in factors)
    assert len(set(factors)) == 21


@given(st.integers(0, 14), st.integers(1, 2**64 - 1), st.integers(0, 2**32))
def test_any_change_of_one_word_changes_the_mix(word, change, seed):
    rows = rows_of(keys_of(seed, 1), 5)
    other = rows.copy()
    other[0, word] ^= np.uint64(change)
    assert mix_many(rows, 3)[0] != mix_many(other, 3)[0]


@given(st.integers(1, 2**15 - 2), st.integers(0, 2**32))
def test_no_mixture_of_two_entries_has_the_mix_of_either(mask, seed):
    one, two = rows_of(keys_of(seed, 1), 5), rows_of(keys_of(seed, 1), 6)
    choice = np.array([mask >> word & 1 for word in range(16)], bool)
    mixed = np.where(choice, one, two)
    for whole in (one, two):
        if (mixed[0, :15] != whole[0, :15]).any():
            assert mix_many(mixed, 3)[0] != mix_many(whole, 3)[0]


def test_the_boot_id_is_in_the_mix():
    seeds = {mix_seed(boot) for boot in (1, 2, 1 << 64, (1 << 64) + 1, 3 << 100, 2**128 - 1)}
    assert len(seeds) == 6


@pytest.mark.parametrize(
    ("slot", "length", "fits"),
    [
        (0, 4096, True),
        (1, 4096 * 8, True),
        (1, 4096 * 8 + 1, False),
        (0, 4096 * 9, True),
        (0, 4096 * 9 + 1, False),
        (9, 0, True),
        (9, 1, False),
        (10, 0, False),
        (2**64 - 1, 0, False),
        (2**52 - 1, 4096, False),
        (2**63, 2**48 - 1, False),
    ],
)
def test_an_entry_fits_with_its_whole_record(slot, length, fits):
    arena_bytes = 4096 * 10 + 100
    meta = PageMeta(key=KEY, length=length, codec=Codec.RAW, payload_sum=bytes(16))
    rows = encode_entries(
        [encode_entry(PageRef(1, Tier.HOST, slot, 1), meta, namespace=1, shard=0)]
    )
    assert entry_fits(rows, arena_bytes).tolist() == [fits]
    assert fits == (slot * 4096 + 4096 + length <= 4096 * 10)
    if fits:
        assert slot * 4096 + record_bytes(length) <= arena_bytes


@pytest.mark.parametrize(
    ("byte", "value"),
    [(38, 3), (38, 0), (39, 1), (39, 0x10), (39, 0x31), (62, 0), (62, 3), (63, 2)],
)
def test_an_entry_of_another_kind_does_not_fit(byte, value):
    meta = PageMeta(key=KEY, length=9, codec=Codec.FP8, payload_sum=bytes(16), lossy=True)
    block = bytearray(encode_entry(PageRef(1, Tier.HOST, 0, 1), meta, namespace=1, shard=0))
    assert entry_fits(encode_entries([block]), 1 << 20).tolist() == [True]
    block[byte] = value
    assert entry_fits(encode_entries([block]), 1 << 20).tolist() == [False]


@pytest.mark.parametrize("seed", range(3))
def test_random_words_never_lead_out_of_the_arena(seed):
    rows = np.random.default_rng(seed).integers(0, 2**64, (20_000, 16), np.uint64)
    rows[:, 4] = rows[:, 4] & np.uint64(2**48 - 1) | np.uint64(0x1102 << 48)
    rows[:, 7] = rows[:, 7] & np.uint64(2**21 - 1) | np.uint64(1 << 48)
    rows[::2, 6] &= np.uint64(0xFFF)
    arena_bytes = 4 << 20
    fits = entry_fits(rows, arena_bytes)
    assert 100 < np.count_nonzero(fits) < 10_000
    for slot, packed in rows[fits][:, [6, 7]].tolist():
        assert slot * 4096 + 4096 + packed % 2**48 <= arena_bytes


def test_keys_are_checked():
    keys = keys_of(1, 3)
    assert key_words([key.tobytes() for key in keys]).tolist() == key_words(keys).tolist()
    assert key_words([]).tolist() == []
    # Neither strided nor at an odd address.
    padded = np.zeros((3, 41), np.uint8)
    padded[:, 9:] = keys
    assert key_words(padded[:, 9:]).tolist() == key_words(keys).tolist()
    odd = np.zeros(97, np.uint8)[1:].reshape(3, 32)
    odd[:] = keys
    assert key_words(odd).tolist() == key_words(keys).tolist()
    for wrong in ([bytes(31)], [bytes(32), bytes(33)], keys.astype(np.int8), keys[:, :31], keys[0]):
        with pytest.raises(KeyLengthError):
            key_words(wrong)


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(LimitExceeded, match="shard 65536"):
        name_word(1, 1 << 16)
    with pytest.raises(LimitExceeded):
        name_word(-1, 0)
    for number, generation in ((0, 1), (1, 0), (1 << 32, 1), (1, 1 << 32)):
        with pytest.raises(LimitExceeded):
            namespace_word(number, generation)
    with pytest.raises(LimitExceeded, match="directory entry"):
        encode_entry(PageRef(1, Tier.HOST, 1 << 64, 1), META, namespace=1, shard=0)
    with pytest.raises(OverflowError):
        identities([KEY], namespaces=1 << 32, shards=0)
    for pages, namespaces, boot in ((0, 1, 1), (1, 0, 1), (1 << 36, 1, 1), (1, 1 << 27, 1),
                                    (1, 1, 0), (1, 1, 1 << 128)):  # fmt: skip
        with pytest.raises(InvalidConfigValue):
            header_for(pages_max=pages, namespaces_max=namespaces, boot_id=boot, hash_seed=0)


@pytest.mark.parametrize("pages", [1, 8, 9, 1000, 1024, 1025])
def test_the_load_is_at_most_one_half(pages):
    header = header_for(pages_max=pages, namespaces_max=4096, boot_id=1, hash_seed=0)
    assert header.entries >= max(16, 2 * pages)
    assert header.entries < max(32, 4 * pages)
    assert header.namespace_words == 4 * 4096
    assert header.entries_offset % 4096 == 0


@pytest.mark.parametrize("words", [512, 16384, 1 << 28])
def test_namespaces_in_a_row_lie_apart(words):
    places = [namespace_place(number, words) for number in range(1, 129)]
    assert all(0 <= place < words for place in places)
    assert len(set(places)) == 128


def patched(offset: int, data: bytes, *, is_resealed: bool) -> bytes:
    header = header_for(pages_max=5, namespaces_max=1, boot_id=BOOT_ID, hash_seed=1)
    block = bytearray(encode_header(header))
    block[offset : offset + len(data)] = data
    if is_resealed:
        block[120:] = struct.pack("<Q", mix(bytes(block), int.from_bytes(block[16:32], "little")))
    return bytes(block)


@pytest.mark.parametrize("is_resealed", [True, False])
@pytest.mark.parametrize(
    ("offset", "data", "words"),
    [
        (0, b"\x89KVTREC\n", "no directory here"),
        (8, struct.pack("<I", 2), "version 2; this build reads version 1"),
        (12, struct.pack("<I", 8192), "contradicts itself"),
        (32, struct.pack("<Q", 17), "no powers of two"),
        (32, struct.pack("<Q", 8), "no powers of two"),
        (32, struct.pack("<Q", 1 << 63), "no powers of two"),
        (32, struct.pack("<Q", 32), "contradicts itself"),
        (48, struct.pack("<Q", 0), "no powers of two"),
        (48, struct.pack("<Q", 1024), "contradicts itself"),
        (56, struct.pack("<Q", 4096), "contradicts itself"),
        (64, struct.pack("<Q", 1 << 40), "contradicts itself"),
    ],
)
def test_a_wrong_header_is_named(offset, data, words, is_resealed):
    size = header_for(pages_max=5, namespaces_max=1, boot_id=1, hash_seed=1).file_bytes
    if not is_resealed and offset > 8:
        words = "damaged"
    with pytest.raises(DirectoryError, match=words) as caught:
        decode_header(patched(offset, data, is_resealed=is_resealed), size)
    assert caught.value.remedy


def test_a_header_of_a_shorter_file_is_refused():
    header = header_for(pages_max=5, namespaces_max=1, boot_id=BOOT_ID, hash_seed=1)
    with pytest.raises(DirectoryError, match="and says"):
        decode_header(encode_header(header), header.file_bytes - 4096)


@pytest.mark.parametrize("bit", range(0, 1024, 7))
def test_any_flipped_bit_of_the_header_is_found(bit):
    header = header_for(pages_max=5, namespaces_max=1, boot_id=BOOT_ID, hash_seed=1)
    block = bytearray(encode_header(header))
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DirectoryError):
        decode_header(bytes(block), header.file_bytes)


def write_golden() -> None:
    """How the golden file was made; kept so that the next version can be made alike."""
    with golden_directory("numpy") as made:
        GOLDEN.write_text(dump(content(made)))
