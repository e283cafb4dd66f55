"""Keys as an engine has them: page hashes, as text or bytes."""

from __future__ import annotations

import pytest

import kvtier


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
