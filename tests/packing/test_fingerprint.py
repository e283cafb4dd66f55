"""Equal families have equal fingerprints, and every field of a family changes them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_samples import family, layout, segment

from kvtier.packing.layout import Layout, Role, ScaleRule, Segment, Shard

GOLDEN = Path(__file__).parent.parent / "golden" / "fingerprint_v1.json"

#: Another sound value for each field. A new field of the dataclasses must get a row here.
LAYOUT_ROWS = {
    "model_id": ["maker/model2", "maker"],
    "weights_revision": ["0123abce"],
    "adapter_id": ["lora2"],
    "adapter_revision": ["8"],
    "kv_compute": ["float8_e4m3fn", "float16"],
    "rope": ["", '{"factor":4.0,"rope_theta":10000.0,"rope_type":"yarn"}'],
    "key_scheme": ["sha256-chain-bigram"],
    "page_tokens": [32, 128],
    "storage_order": ["LHTD", "TLHD"],
    "shard_count": [2, 8],
}
SEGMENT_ROWS = {
    "name": ["q"],
    "role": [Role.VALUE, Role.LATENT],
    "dtype": ["float16", "float32"],
    "layers": [5],
    "heads": [4],
    "dim": [16],
    "scale_rule": [ScaleRule.NONE],
}
SHARD_ROWS = {"index": [0], "layers": [(2, 4)], "heads": [(0, 1)]}


def plain(first: Segment | None = None) -> Layout:
    return layout(first or segment(), segment("v", Role.VALUE))


def test_every_field_has_a_row():
    assert {f.name for f in dataclasses.fields(Layout)} == {*LAYOUT_ROWS, "segments", "shard"}
    assert {f.name for f in dataclasses.fields(Segment)} == set(SEGMENT_ROWS)
    assert {f.name for f in dataclasses.fields(Shard)} == set(SHARD_ROWS)


def variants() -> dict[str, tuple]:
    """(layout, tenant, salt) of the base family and of every family one step away from it."""
    base = family()
    found = {"base": (base, "acme", b"s"), "tenant": (base, "acm", b"s")}
    found["salt"] = (base, "acme", b"t")
    found["no salt"] = (base, "acme", b"")
    found["tenant and salt joined"] = (base, "acmes", b"")
    for field, values in LAYOUT_ROWS.items():
        for value in values:
            found[f"{field}={value}"] = (
                dataclasses.replace(base, **{field: value}), "acme", b"s",
            )  # fmt: skip
    without = dataclasses.replace(base, adapter_id="", adapter_revision="")
    found["no adapter"] = (without, "acme", b"s")
    found["fewer segments"] = (
        dataclasses.replace(base, segments=base.segments[:-1]), "acme", b"s",
    )  # fmt: skip
    swapped = (base.segments[1], base.segments[0], *base.segments[2:])
    found["segments swapped"] = (dataclasses.replace(base, segments=swapped), "acme", b"s")
    for field, values in SEGMENT_ROWS.items():
        for value in values:
            changed = plain(dataclasses.replace(segment(), **{field: value}))
            found[f"segment.{field}={value}"] = (changed, "acme", b"s")
    found["plain"] = (plain(), "acme", b"s")
    return found


def test_every_change_changes_the_fingerprint_and_no_two_are_equal():
    prints = {name: page.fingerprint(who, salt) for name, (page, who, salt) in variants().items()}
    assert all(len(digest) == 32 for digest in prints.values())
    assert len(set(prints.values())) == len(prints)


def test_the_shard_does_not_change_it():
    base = family()
    for field, values in SHARD_ROWS.items():
        for value in values:
            moved = base.with_shard(dataclasses.replace(base.shard, **{field: value}))
            assert moved != base
            assert moved.fingerprint("acme") == base.fingerprint("acme")


def test_an_absent_salt_is_the_empty_one():
    assert family().fingerprint("acme") == family().fingerprint("acme", b"")


texts = st.text(max_size=6)


@given(
    one=st.tuples(texts, texts, st.binary(max_size=6), texts, texts),
    two=st.tuples(texts, texts, st.binary(max_size=6), texts, texts),
)
def test_equal_only_if_all_text_is_equal(one, two):
    """Text cannot flow from one field into its neighbour, whatever it contains."""

    def digest(values: tuple) -> bytes:
        model, tenant, salt, rope, revision = values
        page = layout(model_id="m" + model, revision="r" + revision, rope=rope)
        return page.fingerprint(tenant, salt)

    assert (digest(one) == digest(two)) == (one == two)


@pytest.mark.parametrize("name", ["base", "no salt", "plain", "no adapter"])
def test_golden(name):
    """These bytes lie on disks: a difference means a new FINGERPRINT_VERSION, not a new file."""
    page, tenant, salt = variants()[name]
    assert page.fingerprint(tenant, salt).hex() == json.loads(GOLDEN.read_text())[name]
