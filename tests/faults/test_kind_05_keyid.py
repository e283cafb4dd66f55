"""Kind 5, KEYID: a page on NVMe belongs to its own family alone, in this boot and in the next.

One key, many families that differ in one field each: every one has a page of its own under it. A
new field of the layout without a row here fails.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

import kvtier
from kvtier.core.page import GetCode, PutCode, Tier
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment, Shard
from tests.faults.kinds_rig import key_of, on_loop, page_of, running, wrong_cells

KEY = key_of("of all families")

LAYOUT_ROWS = {
    "model_id": "m2",
    "weights_revision": "r2",
    "adapter_id": "lora2",
    "adapter_revision": "8",
    "kv_compute": "float8_e4m3fn",
    "rope": '{"factor":4.0}',
    "key_scheme": "sha256-chain-bigram",
    "page_tokens": 8,
    "storage_order": "LHTD",
    "shard_count": 2,
}
SEGMENT_ROWS = {
    "name": "q",
    "role": Role.LATENT,
    "dtype": "float16",  # as many bytes, another meaning
    "layers": 5,
    "heads": 4,
    "dim": 128,
    "scale_rule": ScaleRule.NONE,
}


def segment(name: str = "k", role: Role = Role.KEY, **changes) -> Segment:
    shape = {"dtype": "bfloat16", "layers": 4, "heads": 2, "dim": 64}
    return Segment(name=name, role=role, **({"scale_rule": ScaleRule.LAYER_HEAD} | shape | changes))


def base_layout(*segments: Segment) -> Layout:
    made = Layout.from_segments(
        segments or (segment(),),
        model_id="m",
        revision="r1",
        page_tokens=16,
        kv_compute="bfloat16",
        adapter_id="lora",
        adapter_revision="7",
    )
    return replace(made, rope='{"factor":1.0}')


def families() -> dict[str, tuple[Layout, str, bytes]]:
    """(layout, tenant, salt) of the base and of each family one field away from it."""
    base = base_layout()
    found = {"base": (base, "acme", b"s"), "tenant": (base, "acm", b"s")}
    found |= {"salt": (base, "acme", b"t"), "no salt": (base, "acme", b"")}
    for name, value in LAYOUT_ROWS.items():
        found[name] = (replace(base, **{name: value}), "acme", b"s")
    for name, value in SEGMENT_ROWS.items():
        changed = replace(segment(), **{name: value})
        found[f"segment {name}"] = (base_layout(changed), "acme", b"s")
    found["no adapter"] = (replace(base, adapter_id="", adapter_revision=""), "acme", b"s")
    found["two segments"] = (base_layout(segment(), segment("v", Role.VALUE)), "acme", b"s")
    found["swapped"] = (base_layout(segment("v", Role.VALUE), segment()), "acme", b"s")
    other_rank = replace(base, shard_count=2).with_shard(
        Shard(index=1, layers=(0, 4), heads=(0, 2)),
    )
    found["the other rank"] = (other_rank, "acme", b"s")
    return found


def test_every_field_has_a_row():
    assert {f.name for f in fields(Layout)} == {*LAYOUT_ROWS, "segments", "shard"}
    assert {f.name for f in fields(Segment)} == set(SEGMENT_ROWS)
    assert {f.name for f in fields(Shard)} == {"index", "layers", "heads"}


async def opened(kv, families):
    return {
        name: await kv.namespace(layout, tenant=tenant, salt=salt)
        for name, (layout, tenant, salt) in families.items()
    }


async def what_each_has(namespaces) -> dict[str, GetCode]:
    """The outcome of the key in every family; a hit holds this family's own bytes."""
    found = {}
    for name, ns in namespaces.items():
        got = await ns.get([KEY])
        found[name] = got[0].reason
        if got.hits:
            assert wrong_cells(got.pages[0], KEY, tenant=name) == [], name
    return found


def page(name: str, layout: Layout) -> bytes:
    return page_of(KEY, layout.raw_bytes, tenant=name)


@on_loop
async def test_only_the_family_that_put_a_page_finds_it(base):
    """Nobody but the first has anything: every other one is one field away from a wrong page."""
    known = families()
    ranks = {"shard_count", "the other rank"}
    async with running(base, "limits.namespaces_max=100") as daemon:
        namespaces = await opened(daemon.kv, known)
        prints = {ns.fingerprint for name, ns in namespaces.items() if name != "the other rank"}
        assert len(prints) == len(namespaces) - 1
        first = namespaces["base"]
        put = await first.put([KEY], [page("base", first.layout)], durable="nvme")
        assert put.durable == 1
        expected = dict.fromkeys(known, GetCode.MISS) | {"base": GetCode.HIT}
        assert await what_each_has(namespaces) == expected
    async with running(base, "limits.namespaces_max=100") as daemon:
        namespaces = await opened(daemon.kv, known)
        for name, ns in namespaces.items():
            if name != "base":
                assert (await ns.lookup([KEY])).hits == 0, name
                assert (await ns.prefetch([KEY])).reasons == [GetCode.MISS], name
                assert (await ns.delete([KEY])).deleted == 0, name
        assert await what_each_has(namespaces) == expected
        second = namespaces["shard_count"]
        put = await second.put([KEY], [page("shard_count", second.layout)], durable="nvme")
        assert put.durable == 1
        assert (await second.lookup([KEY])).hits == 0, "half of a page is none"
        other = namespaces["the other rank"]
        put = await other.put([KEY], [page("the other rank", other.layout)], durable="nvme")
        assert put.reasons == [PutCode.STORED], "of another rank, with other bytes"
        assert (await second.lookup([KEY])).hits == (await other.lookup([KEY])).hits == 1
        expected |= dict.fromkeys(ranks, GetCode.HIT)
        assert await what_each_has(namespaces) == expected
        await daemon.settled()


@on_loop
async def test_each_family_has_its_own_page_under_one_key(base):
    known = families()
    async with running(base, "limits.namespaces_max=100") as daemon:
        namespaces = await opened(daemon.kv, known)
        for name, ns in namespaces.items():
            put = await ns.put([KEY], [page(name, ns.layout)], durable="nvme")
            assert (put.reasons, put.durable) == ([PutCode.STORED], 1), name
        assert daemon.counts(Tier.NVME).sealed == len(known)
    async with running(base, "limits.namespaces_max=100") as daemon:
        namespaces = await opened(daemon.kv, known)
        expected = dict.fromkeys(known, GetCode.HIT)
        assert await what_each_has(namespaces) == expected
        assert (await namespaces["base"].delete([KEY])).deleted == 1
        await namespaces["tenant"].bump()
        await daemon.kv.delete_namespace(known["salt"][0], tenant="acme", salt=b"t")
        expected |= {"base": GetCode.MISS, "tenant": GetCode.STALE, "salt": GetCode.STALE}
        assert await what_each_has(namespaces) == expected
    async with running(base, "limits.namespaces_max=100") as daemon:
        namespaces = await opened(daemon.kv, known)
        expected |= {"tenant": GetCode.MISS, "salt": GetCode.MISS}
        assert await what_each_has(namespaces) == expected
        await daemon.settled()


@on_loop
async def test_another_shape_under_the_same_name_is_refused_or_another_family(base):
    """The cut of a shard is not part of the family: two engines that cut it otherwise are told."""
    base_family = replace(base_layout(), shard_count=2).with_shard(
        Shard(index=0, layers=(0, 4), heads=(0, 1))
    )
    async with running(base) as daemon:
        ns = await daemon.kv.namespace(base_family)
        await ns.put([KEY], [page("first", base_family)], durable="nvme")
    otherwise = base_family.with_shard(Shard(index=0, layers=(0, 2), heads=(0, 2)))
    assert otherwise.fingerprint("default") == base_family.fingerprint("default")
    assert otherwise.raw_bytes == base_family.raw_bytes
    async with running(base) as daemon:
        with pytest.raises(kvtier.NamespaceMismatch, match="shard"):
            await daemon.kv.namespace(otherwise)
        assert (await (await daemon.kv.namespace(base_family)).get([KEY])).hits == 1
