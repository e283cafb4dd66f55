"""Kind 1, DROPPED: what failed is never told as success, on no way up.

Every outcome that a movement, a get or a put can have has a case here; a new one without a case
fails.
"""

from __future__ import annotations

import pytest

import kvtier
from kvtier.client.results import GetColumns, GetResult, PutResult
from kvtier.core.page import Codec, Durability, GetCode, PutCode, Tier
from kvtier.testing.faulty_tier import FaultKind
from kvtier.transfer.mover import MoveCode
from kvtier.transfer.outlet import Outlet
from kvtier.transfer.place import Verify
from tests.faults.kinds_rig import (
    READ,
    WRITE,
    always,
    get_checked,
    key_of,
    keys_of,
    on_loop,
    pages_of,
    poisoned,
    put_on_disk,
    rows,
    running,
    until,
    wrong_cells,
)

KEYS = keys_of(range(16))
#: Where something hangs: else a busy machine could be taken for a device that does.
QUICK = "nvme.io_timeout_ms=150"
FAILURES = {
    "eio": (FaultKind.EIO, GetCode.IO_ERROR),
    "short": (FaultKind.SHORT, GetCode.IO_ERROR),
    "timeout": (FaultKind.HANG, GetCode.TIMEOUT),
    "corrupt": (FaultKind.FLIP, GetCode.CORRUPT),
}


# -- T1: one read of a batch fails ----------------------------------------------------------------


@pytest.mark.parametrize("failure", FAILURES)
@on_loop
async def test_one_failed_read_is_one_failed_page(base, failure):
    kind, code = FAILURES[failure]
    await put_on_disk(base, KEYS)
    async with running(base, *([QUICK] if failure == "timeout" else [])) as daemon:
        ns = await daemon.namespace()
        daemon.disk.plan(always(kind), slots=daemon.slots(ns, KEYS[9:10]))
        out = poisoned(len(KEYS))
        got = await ns.get(KEYS, out=out)
        assert daemon.disk.count(kind) >= 1
        assert got.reasons == [GetCode.HIT] * 9 + [code] + [GetCode.HIT] * 6
        assert got.prefix == 9
        assert {item.tier for item in got} == {Tier.NVME, None}
        for i in set(range(16)) - {9}:
            assert wrong_cells(out[i].data, KEYS[i]) == []
        assert daemon.metric("kvtier_get_pages_total", code=code.name.lower()) == 1
        assert daemon.metric("kvtier_get_hits_total", tier="nvme") == 15
        daemon.disk.heal()
        await until(lambda: daemon.counts(Tier.NVME).pinned == 0)
        if failure == "timeout":  # the device is offline, and its pages go
            await until(lambda: daemon.counts(Tier.NVME).sealed == 0)
        # Only a device's word that the bytes are gone makes the page go.
        after = GetCode.HIT if failure in ("eio", "short") else GetCode.MISS
        assert (await get_checked(ns, KEYS))[9].reason is after
        await daemon.settled()


@on_loop
async def test_no_memory_for_a_page_that_comes_up_is_busy_and_not_a_hit(base):
    """Everything of the arena is leased, and the reads past it take all they may."""
    await put_on_disk(base, KEYS)
    async with running(base) as daemon:
        ns = await daemon.namespace()
        filling = keys_of(f"fill {n}" for n in range(400))
        stored = [
            key
            for at in range(0, 400, 100)
            for key, item in zip(
                filling[at : at + 100],
                await ns.put(filling[at : at + 100], pages_of(filling[at : at + 100])),
                strict=True,
            )
            if item.is_stored
        ]
        async with ns.lease(stored) as held:
            assert held.reasons.count(GetCode.HIT) >= 150
            got = await get_checked(ns, KEYS)
            assert got.reasons == [GetCode.HIT] * 16, "past the arena"
            daemon.node.nvme.mover.bounced_bytes += 1 << 40
            out = poisoned(16)
            got = await ns.get(KEYS, out=out)
            assert got.reasons == [GetCode.BUSY] * 16
            assert got.prefix == 0
            daemon.node.nvme.mover.bounced_bytes -= 1 << 40
        assert (await get_checked(ns, KEYS)).prefix == 16
        await daemon.settled()


# -- T2: a write fails ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FaultKind.EIO, FaultKind.ENOSPC, FaultKind.SHORT, FaultKind.HANG])
@on_loop
async def test_a_failed_durable_put_is_not_durable_and_leaves_nothing(base, kind):
    keys = KEYS[:3]
    async with running(base, *([QUICK] if kind is FaultKind.HANG else [])) as daemon:
        ns = await daemon.namespace()
        daemon.disk.plan(always(kind, WRITE))
        put = await ns.put(keys, pages_of(keys), durable="nvme")
        assert put.reasons == [PutCode.STORED] * 3, "they are in host memory"
        assert (put.durable, [item.durable for item in put]) == (0, [False] * 3)
        with pytest.raises(kvtier.NotDurable):
            put.raise_for_refused()
        result = "timeout" if kind is FaultKind.HANG else "io_error"
        failed = daemon.metric("kvtier_moves_total", way="down", result=result)
        assert failed == daemon.metric("kvtier_nvme_io_errors_total") == 3
        assert daemon.metric("kvtier_moves_total", way="down", result="done") == 0
        assert daemon.counts(Tier.NVME).sealed == 0
        assert (await get_checked(ns, keys)).prefix == 3
        assert await daemon.kv.flush() == kvtier.client.FlushResult(pages=0, pages_lost=3)
    async with running(base) as daemon:
        ns = await daemon.namespace()
        assert daemon.counts(Tier.NVME).sealed == 0
        assert (await ns.lookup(keys)).hits == 0
        assert (await ns.get(keys)).reasons == [GetCode.MISS] * 3
        again = await ns.put(keys, pages_of(keys), durable="nvme")
        assert (again.reasons, again.durable) == ([PutCode.STORED] * 3, 3)
    async with running(base) as daemon:
        assert (await get_checked(await daemon.namespace(), keys)).prefix == 3
        await daemon.settled()


@on_loop
async def test_a_failed_demotion_is_counted_and_the_page_stays(base):
    async with running(base) as daemon:
        ns = await daemon.namespace()
        await ns.put(KEYS[:2], pages_of(KEYS[:2]))
        daemon.disk.plan(always(FaultKind.EIO, WRITE))
        assert (await ns.demote(KEYS[:2])).reasons == [GetCode.HIT] * 2, "on its way"
        await until(lambda: daemon.metric("kvtier_moves_total", way="down", result="io_error") == 2)
        assert daemon.counts(Tier.NVME).sealed == 0
        assert {item.tier for item in await get_checked(ns, KEYS[:2])} == {Tier.HOST}
        daemon.disk.heal()
        await ns.demote(KEYS[:2])
        await until(lambda: daemon.counts(Tier.NVME).sealed == 2)
        await daemon.settled()


# -- T3: every outcome ----------------------------------------------------------------------------

#: What a get of a page that is on NVMe alone says, for each way that bringing it up can end.
GET_OF_MOVE = {
    MoveCode.DONE: GetCode.HIT,
    MoveCode.BUSY: GetCode.BUSY,
    MoveCode.GONE: GetCode.MISS,
    MoveCode.CORRUPT: GetCode.CORRUPT,
    MoveCode.IO_ERROR: GetCode.IO_ERROR,
    MoveCode.TIMEOUT: GetCode.TIMEOUT,
    MoveCode.REFUSED: GetCode.REFUSED,
}


class _ScriptedMover:
    """Ends every movement as it is told; DONE really is the movement of `real`."""

    def __init__(self, real):
        self._real = real
        self.code = MoveCode.DONE

    async def promote(self, source, page, io_class):
        return await self._moved(self._real.promote, source, page, io_class)

    async def demote(self, source, page, io_class):
        return await self._moved(self._real.demote, source, page, io_class)

    async def read_through(self, source, page):
        return MoveCode.BUSY

    async def settle(self):
        await self._real.settle()

    async def _moved(self, really, source, page, io_class):
        if self.code is MoveCode.DONE:
            return await really(source, page, io_class)
        source.release()
        return self.code


def test_every_outcome_of_a_movement_has_a_case():
    assert set(GET_OF_MOVE) == set(MoveCode)


@on_loop
async def test_every_outcome_of_a_promotion_reaches_the_get(base):
    await put_on_disk(base, KEYS[:3])
    async with running(base) as daemon:
        ns = await daemon.namespace()
        assert (await ns.prefetch(KEYS[:1])).prefix == 1
        await until(lambda: daemon.counts(Tier.HOST).sealed == 1)
        (session,) = daemon.node.sessions
        (handle,) = session.handles.values()
        mover = _ScriptedMover(daemon.node.nvme.mover)
        for mover.code in sorted(MoveCode, key=lambda code: code is MoveCode.DONE):
            outlet = Outlet(
                daemon.store,
                daemon.node.arena,
                handle.bound,
                rows(KEYS[:3]),
                accept=frozenset((Codec.RAW,)),
                lossy_ok=False,
                verify=Verify.ALWAYS,
                sample_one_in=1,
                mover=mover,
            )
            async with outlet:
                pages = [(page.code, page.payload is not None) async for page in outlet]
            expected = (GET_OF_MOVE[mover.code], mover.code is MoveCode.DONE)
            assert pages == [(GetCode.HIT, True), expected, expected]
        await daemon.settled()


@on_loop
async def test_every_outcome_of_a_demotion_reaches_the_put_and_the_flush(base):
    async with running(base) as daemon:
        ns = await daemon.namespace()
        tiering = daemon.node.nvme.tiering
        tiering._mover = mover = _ScriptedMover(tiering._mover)
        for mover.code in MoveCode:
            keys = keys_of([f"{mover.code} {n}" for n in range(2)])
            is_done = mover.code is MoveCode.DONE
            put = await ns.put(keys, pages_of(keys), durable="nvme")
            assert put.reasons == [PutCode.STORED] * 2
            assert put.durable == (2 if is_done else 0)
            flushed = await daemon.kv.flush()
            assert (flushed.pages, flushed.pages_lost) == ((2, 0) if is_done else (0, 2))
        mover.code = MoveCode.DONE


@pytest.mark.parametrize("code", GetCode)
def test_a_prefix_ends_before_every_code_but_hit(code):
    codes = bytes((GetCode.HIT, code, GetCode.HIT))
    columns = GetColumns(
        codes=codes,
        tiers=bytes([Tier.NVME] * 3),
        codecs=bytes([Codec.RAW] * 3),
        lossy=bytes(3),
        boot_ids=[1] * 3,
        slots=[1] * 3,
        generations=[1] * 3,
    )
    got = GetResult(columns, page_tokens=4)
    is_hit = code is GetCode.HIT
    assert (got.prefix, got.prefix_tokens, got.hits) == ((3, 12, 3) if is_hit else (1, 4, 2))
    assert (got[1].reason, got[1].tier is None, got[1].ref is None) == (
        code,
        not is_hit,
        not is_hit,
    )


@pytest.mark.parametrize("code", PutCode)
def test_every_code_of_a_put_is_stored_or_an_error_with_a_remedy(code):
    put = PutResult(bytes((PutCode.STORED, code)), [None, None])
    if code in (PutCode.STORED, PutCode.EXISTS):
        put.raise_for_refused()
        assert put.stored == 2
        volatile = PutResult(
            bytes((code,)), [None], reached=bytes((Durability.HOST,)), wanted=Durability.NVME
        )
        with pytest.raises(kvtier.NotDurable):
            volatile.raise_for_refused()
        return
    assert (put.stored, put.prefix) == (1, 1)
    with pytest.raises(kvtier.KvtierError, match=f"page 1 is {code.name}") as caught:
        put.raise_for_refused()
    assert caught.value.remedy


@on_loop
async def test_a_get_without_memory_has_no_bytes_for_what_is_no_hit(base):
    await put_on_disk(base, KEYS[:3])
    async with running(base) as daemon:
        ns = await daemon.namespace()
        daemon.disk.plan(always(FaultKind.SHORT, READ), slots=daemon.slots(ns, KEYS[1:2]))
        got = await ns.get([*KEYS[:3], key_of("never put")])
        first, second, third, fourth = got.pages
        assert [bytes(first), bytes(third)] == [pages_of(KEYS[:3])[i] for i in (0, 2)]
        assert (second, fourth) == (None, None)
        await daemon.settled()
