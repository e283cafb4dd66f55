"""Kind 12, KEYENC: a key is 32 bytes and nothing else. No byte of it ends it, separates it or means
anything, in the index, in the journal, in the checkpoint and in the records on NVMe.
"""

from __future__ import annotations

import random

import pytest

import kvtier
from kvtier.core.page import GetCode, PutCode, Tier
from tests.faults.kinds_rig import get_checked, on_loop, pages_of, running

_BASE = bytes(range(1, 33))
KEYS = [
    bytes(32),  # also what an absent parent could be taken for
    b"\xff" * 32,
    bytes(31) + b"\x01",
    b"\x01" + bytes(31),
    b"\xff" * 31 + b"\xfe",
    _BASE,
    _BASE[:31] + b"\x00",  # equal but for the last byte
    _BASE[:31] + b"!",
    _BASE[:8] + _BASE[8:][::-1],  # equal first words: 8, 16, 24 bytes
    _BASE[:16] + _BASE[16:][::-1],
    _BASE[:24] + _BASE[24:][::-1],
    b"../../../../../../../../etc/pass",
    b"a/b/c\x00d\x00e".ljust(32, b"\x00"),
    b"a/b/c\x00d\x00f".ljust(32, b"\x00"),
    b"key:1".ljust(32, b":"),
    b"key:1".ljust(32, b"@"),
    b"%s%n\r\n\t'\"\\;".ljust(32, b"\x7f"),
    b"-1".rjust(32, b"0"),
    b"0x" + b"f" * 30,
    b"\xc3\x28\xe2\x82".ljust(32, b"\x80"),  # no UTF-8
]
#: One bit of one byte apart.
KEYS += [bytes(_BASE[:at]) + bytes([_BASE[at] ^ 0x80]) + _BASE[at + 1 :] for at in range(0, 32, 4)]


def test_they_are_all_different():
    assert len(set(KEYS)) == len(KEYS) == 28
    assert {len(key) for key in KEYS} == {32}


@pytest.mark.parametrize("ends", ["by SIGTERM", "by SIGKILL"])
@on_loop
async def test_every_key_has_its_own_page_through_nvme_and_restarts(base, ends):
    """Each key is written, found, deleted and found gone alone; the others stay as they are."""
    keys = list(KEYS)
    random.Random(12).shuffle(keys)
    gone: list[bytes] = []
    async with running(base) as daemon:
        ns = await daemon.namespace()
        for key in keys[::2]:
            put = await ns.put([key], pages_of([key]), durable="nvme")
            assert (put.reasons, put.durable) == ([PutCode.STORED], 1), key
        odd = keys[1::2]
        assert (await ns.lookup(odd)).hits == 0, "a neighbour of a key is not the key"
        put = await ns.put(odd, pages_of(odd), durable="nvme", chain=False)
        assert put.reasons == [PutCode.STORED] * len(odd)
        assert put.durable == len(odd)
        daemon.stops = ends == "by SIGTERM"
    for _ in range(3):
        async with running(base) as daemon:
            ns = await daemon.namespace()
            got = await get_checked(ns, keys)
            expected = [GetCode.MISS if key in gone else GetCode.HIT for key in keys]
            assert got.reasons == expected
            assert {item.tier for item in got} <= {Tier.NVME, None}
            some = [key for key in keys if key not in gone][:7]
            assert (await ns.delete(some)).deleted == 7
            gone += some
            assert (await ns.lookup(keys)).hits == len(keys) - len(gone)
            await daemon.settled()
            daemon.stops = ends == "by SIGTERM"


@on_loop
async def test_a_parent_of_zeros_is_a_parent(base):
    """The key of zeros can be the head of a chain, and no parent is not that key."""
    head, tail, alone = KEYS[0], KEYS[1], KEYS[5]
    async with running(base) as daemon:
        ns = await daemon.namespace()
        await ns.put([head, tail], pages_of([head, tail]), durable="nvme")
        await ns.put([alone], pages_of([alone]), durable="nvme")
        daemon.stops = True
    async with running(base) as daemon:
        table = daemon.store._residents.table
        ns = await daemon.namespace()
        assert (await get_checked(ns, [head, tail, alone])).prefix == 3
        for tier in (Tier.NVME, Tier.HOST):
            at = {table.key(row): row for row in daemon.store.survey.sealed_rows(tier).tolist()}
            assert table.parent[at[tail]] == at[head] + 1
            assert table.parent[at[head]] == table.parent[at[alone]] == 0
        await daemon.settled()


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33), bytes(64)])
@on_loop
async def test_other_lengths_are_no_keys(base, key):
    async with running(base) as daemon:
        ns = await daemon.namespace()
        for call in (
            lambda: ns.get([key]),
            lambda: ns.put([key], pages_of([bytes(32)]), durable="nvme"),
            lambda: ns.prefetch([key]),
            lambda: ns.demote([key]),
            lambda: ns.delete([key]),
        ):
            with pytest.raises(kvtier.KeyLengthError):
                await call()
        assert daemon.counts(Tier.NVME).sealed == 0
