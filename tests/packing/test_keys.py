"""Keys are SGLang's page hashes, one for each full page, and different input never meets."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import KeyLengthError, LimitExceeded
from kvtier.packing.keys import TOKEN_ID_MAX, chain_keys, salt_seed

GOLDEN = Path(__file__).parent.parent / "golden" / "keys_v1.json"


def oracle(tokens, page, before=b""):
    """The rule, written with nothing but hashlib and struct."""
    keys = []
    for start in range(0, len(tokens) - page + 1, page):
        words = tokens[start : start + page]
        wide = any(word > 0xFFFFFFFF for word in words)
        body = b"".join(struct.pack("<Q" if wide else "<I", word) for word in words)
        before = hashlib.sha256(before + (b"\xff" if wide else b"") + body).digest()
        keys.append(before)
    return keys


def test_golden_vectors():
    golden = json.loads(GOLDEN.read_text())
    for case in golden["chains"]:
        seed = salt_seed(case["salt"].encode())
        keys = chain_keys(case["tokens"], case["page_tokens"], parent=None, seed=seed)
        assert [key.hex() for key in keys] == case["keys"], case["what"]
    assert {salt: salt_seed(salt.encode()).hex() for salt in golden["seeds"]} == golden["seeds"]


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 31, 32, 33, 40])
def test_full_pages_only(tokens):
    keys = chain_keys(list(range(tokens)), 16, parent=None)
    assert len(keys) == tokens // 16
    assert all(len(key) == 32 for key in keys)


ids = st.one_of(st.integers(0, 9), st.integers(0, 2**32 + 9), st.integers(0, TOKEN_ID_MAX))


@given(st.lists(ids, max_size=24), st.integers(1, 5), st.sampled_from([b"", b"p" * 32]))
def test_equal_to_the_rule(tokens, page, before):
    want = oracle(tokens, page, before)
    assert chain_keys(tokens, page, parent=None, seed=before) == want
    assert chain_keys(tokens, page, parent=before or None) == want
    assert chain_keys(np.array(tokens, np.uint64), page, parent=before or None) == want


def test_every_form_of_token_ids_gives_the_same_keys():
    tokens = [5, 0, 2**31, 7, 2**31 - 1, 1, 3, 9]
    want = oracle(tokens, 4)
    for dtype in (np.int64, np.uint64, np.uint32):
        assert chain_keys(np.array(tokens, dtype), 4, parent=None) == want
    assert chain_keys(tuple(tokens), 4, parent=None) == want
    strided = np.zeros(16, np.int64)
    strided[::2] = tokens
    assert chain_keys(strided[::2], 4, parent=None) == want
    torch = pytest.importorskip("torch")
    assert chain_keys(torch.tensor(tokens), 4, parent=None) == want


def test_a_chain_goes_on_from_its_parent():
    tokens = list(range(100, 148))
    whole = chain_keys(tokens, 16, parent=None, seed=salt_seed(b"acme"))
    for cut in range(1, 3):
        head = chain_keys(tokens[: 16 * cut], 16, parent=None, seed=salt_seed(b"acme"))
        # The parent holds the salt already, so a seed beside it changes nothing.
        for seed in (b"", salt_seed(b"acme")):
            assert head + chain_keys(tokens[16 * cut :], 16, parent=head[-1], seed=seed) == whole


def test_wide_and_narrow_pages_stay_apart():
    assert chain_keys([2**32, 1], 2, parent=None) != chain_keys([0, 1], 2, parent=None)
    edge = [2**32 - 1, 0]
    assert chain_keys(edge, 2, parent=None) == oracle(edge, 2)
    mixed = [1, 2, 2**32, 3, 4, 5]
    narrow = [1, 2, 3, 3, 4, 5]
    a, b = chain_keys(mixed, 2, parent=None), chain_keys(narrow, 2, parent=None)
    assert a[0] == b[0]
    assert a[1] != b[1]
    assert a[2] != b[2]


@given(st.lists(st.lists(ids, min_size=2, max_size=4), min_size=2, max_size=6, unique_by=tuple))
def test_different_pages_have_different_keys(pages):
    """Of one page size; two sizes are two families."""
    for size in (2, 3, 4):
        same = [page for page in pages if len(page) == size]
        heads = [chain_keys(page, size, parent=None)[0] for page in same]
        tails = [chain_keys(page, size, parent=b"p" * 32)[0] for page in same]
        assert len({*heads, *tails}) == 2 * len(same)


def test_every_token_and_its_place_counts():
    tokens = list(range(1, 9))
    base = chain_keys(tokens, 8, parent=None)[0]
    found = {base}
    for place in range(8):
        for changed in (tokens[place] ^ 1, tokens[place] + 2**16, tokens[place] + 2**31):
            found.add(
                chain_keys([*tokens[:place], changed, *tokens[place + 1 :]], 8, parent=None)[0]
            )
    found.add(chain_keys(tokens[::-1], 8, parent=None)[0])
    assert len(found) == 26


SALTS = [b"", b"a", b"b", b"a@b", b"a\0b", "sälz".encode(), b"s" * 4096, bytes(32)]


def test_salts_never_meet():
    seeds = [salt_seed(salt) for salt in SALTS]
    assert seeds[0] == b""
    assert all(len(seed) == 32 for seed in seeds[1:])
    keys = [key for seed in seeds for key in chain_keys(range(8), 4, parent=None, seed=seed)]
    assert len(set(keys)) == 2 * len(SALTS)


def test_the_seed_is_sglangs():
    part = b"\x00" + b"\x01" + struct.pack("<Q", 4) + b"acme"
    assert salt_seed(b"acme") == hashlib.sha256(b"sglang-cache-namespace-v1" + part).digest()


def test_no_key_depends_on_the_process():
    code = """if True:
        import sys
        from kvtier.packing.keys import chain_keys, salt_seed
        keys = chain_keys([1, 2, 3, 4], 2, parent=None, seed=salt_seed(b"s"))
        sys.stdout.write(keys[1].hex())
    """
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert found == {chain_keys([1, 2, 3, 4], 2, parent=None, seed=salt_seed(b"s"))[1].hex()}


@pytest.mark.parametrize(
    "bad",
    [
        [-1, 2],
        [2**63, 1],
        [2**64, 1],
        [1.0, 2.0],
        [True, False],
        ["1", "2"],
        [None, 1],
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        np.array([1.5]),
        np.array([-1], np.int8),
        7,
    ],
)
def test_token_ids_that_are_none(bad):
    with pytest.raises(LimitExceeded, match="token_ids") as caught:
        chain_keys(bad, 1, parent=None)
    assert "whole numbers" in caught.value.remedy


@pytest.mark.parametrize("tokens", [0, -4])
def test_page_tokens_must_be_positive(tokens):
    with pytest.raises(LimitExceeded, match=f"page_tokens is {tokens}"):
        chain_keys([1, 2], tokens, parent=None)


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_a_parent_or_seed_that_is_no_hash(length):
    with pytest.raises(KeyLengthError, match=f"parent has {length}"):
        chain_keys([1], 1, parent=bytes(length))
    if length:
        with pytest.raises(KeyLengthError, match=f"seed has {length}"):
            chain_keys([1], 1, parent=None, seed=bytes(length))
