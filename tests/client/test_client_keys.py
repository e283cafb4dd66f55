"""Keys as an engine has them: page hashes, as text or bytes."""

from __future__ import annotations

import pytest

import kvtier
from kvtier.client import KeyChain


def test_keys_equal_the_page_hashes_of_sglang(ns):
    keys = ns.keys(range(8))
    assert keys[0].hex().startswith("baed6423")
    assert keys[1].hex().startswith("01414b05")
    assert ns.keys(range(4, 8), parent=keys[0]) == keys[1:]
    assert ns.keys_from([keys[0].hex(), keys[1]]) == keys
    for bad in ("zz" * 32, "ab" * 31, "ab" * 31 + "  ", "ab" * 31 + "\u0661\u0662", b"short"):
        for good in (keys[0], keys[0].hex()):
            with pytest.raises(kvtier.KeyLengthError, match=r"\[1\]"):
                ns.keys_from([good, bad])


def test_many_hashes_in_text_are_the_keys_they_name(ns):
    made = [bytes([n]) * 31 + bytes([n % 2]) for n in range(200)]  # zeros at the end stay
    assert list(ns.keys_from(key.hex() for key in made)) == made
    assert list(ns.keys_from([key.hex().upper() for key in made])) == made
    assert list(ns.keys_from([])) == []


def test_a_chain_of_hashes_is_the_chain_of_its_keys(ns):
    """In one piece or one by one: slices know what came before them, and single keys are keys."""
    joined, single = (
        ns.keys_from([f"{n:064x}" for n in range(9)]),
        ns.keys_from([bytes(31) + bytes([n]) for n in range(9)]),
    )
    assert joined == single
    assert hash(joined) == hash(single)
    for cut in (slice(0, 9), slice(3, 7), slice(7, 3), slice(-2, None), slice(None, None, 2)):
        one, other = joined[cut], single[cut]
        assert list(one) == list(other) == list(joined)[cut]
        assert len(one) == len(other)
        if isinstance(one, KeyChain):
            assert (one.parent, one.depth) == (other.parent, other.depth)
            assert one.joined == other.joined == b"".join(other)
    assert (joined[3], joined[-1]) == (single[3], single[-1])
    assert joined[4:][2:].parent == single[5]
    with pytest.raises(IndexError):
        joined[9]
