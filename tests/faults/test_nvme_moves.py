"""Movements that end in a way nobody planned for, and pages that NVMe cannot take: nothing is left
half-made or held, and the other pages go their way.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from kvtier.core.page import GetCode, PutCode, Tier
from kvtier.daemon import tiering
from kvtier.errors import KvtierError
from kvtier.transfer import mover
from tests.faults.kinds_rig import (
    get_checked,
    keys_of,
    on_loop,
    pages_of,
    put_on_disk,
    running,
    until,
)

HIT = GetCode.HIT
#: Longer than the segments of a tier of 4 MiB.
BIG_PAGE = 270 << 10


def out_of_memory(*_args: object, **_options: object) -> None:
    raise MemoryError


def mmap_refused(*_args: object, **_options: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.fixture
def unlogged() -> Iterator[None]:
    """A record of the log that pytest keeps holds the frames of its error, and those hold pages."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("unlogged")
@pytest.mark.parametrize(
    ("what", "fails"), [("aligned_buffer", mmap_refused), ("encode_header", out_of_memory)]
)
@on_loop
async def test_a_copy_down_that_meets_an_unexpected_error_leaves_nothing(
    base: Path, what: str, fails: Callable[..., None]
) -> None:
    keys = keys_of(range(6))
    async with running(base) as daemon:
        ns = await daemon.namespace()
        with mock.patch.object(mover, what, fails):
            with suppress(KvtierError):
                put = await ns.put(keys[:3], pages_of(keys[:3]), durable="nvme")
                assert not any(item.durable for item in put)
            await ns.put(keys[3:], pages_of(keys[3:]))
            await ns.demote(keys)
            await until(lambda: daemon.node.nvme.tiering.under_way == 0)
        await daemon.settled()
        assert daemon.counts(Tier.NVME).used_bytes == 0
        assert (await get_checked(ns, keys)).reasons == [HIT] * 6
        put = await ns.put(keys, pages_of(keys), durable="nvme")
        assert [item.durable for item in put] == [True] * 6


@pytest.mark.usefixtures("unlogged")
@pytest.mark.parametrize(
    ("what", "fails"), [("check", out_of_memory), ("encode_header", mmap_refused)]
)
@on_loop
async def test_a_copy_up_that_meets_an_unexpected_error_leaves_nothing(
    base: Path, what: str, fails: Callable[..., None]
) -> None:
    """On the thread that reads, or after it."""
    keys = keys_of(range(4))
    await put_on_disk(base, keys)
    async with running(base) as daemon:
        ns = await daemon.namespace()
        with mock.patch.object(mover, what, fails):
            await ns.prefetch(keys)
            await until(lambda: daemon.node.nvme.tiering.under_way == 0)
            with suppress(KvtierError):
                got = await get_checked(ns, keys)
                assert HIT not in got.reasons
            await daemon.settled()  # a get ends with its first error, its other copies go on
        assert daemon.counts(Tier.HOST).used_bytes == 0
        assert (await get_checked(ns, keys)).reasons == [HIT] * 4


@pytest.mark.parametrize("way", ["cleaner", "flush_all"])
@on_loop
async def test_pages_too_long_for_a_segment_do_not_keep_others_from_nvme(
    base: Path, way: str
) -> None:
    """Those that the way comes to first are all too long, more of them than it takes at once."""
    small, big = keys_of(range(20)), keys_of(f"b{n}" for n in range(20))
    settings = ("nvme.bytes=4MiB", "host.bytes=192MiB")
    if way == "cleaner":
        settings += ("nvme.clean_percent=100",)
    with mock.patch.object(tiering, "_CLEAN_PAGES", 8):
        async with running(base, *settings) as daemon:
            assert daemon.disk.segment_bytes < BIG_PAGE
            # Two slabs, so that pages of neither size have to give way.
            await until(lambda: daemon.counts(Tier.HOST).granted_bytes > 128 << 20)
            ns, other = await daemon.namespace(), await daemon.namespace(BIG_PAGE)
            tiers = daemon.node.nvme.tiering
            if way == "cleaner":  # the coldest first
                await other.put(big, pages_of(big, BIG_PAGE))
                await ns.put(small, pages_of(small))
                await until(lambda: daemon.counts(Tier.NVME).sealed == 20)
            else:  # the latest used first
                await ns.put(small, pages_of(small))
                await other.put(big, pages_of(big, BIG_PAGE))
                assert await tiers.flush_all(time.monotonic() + 10) == 20
            assert daemon.counts(Tier.NVME).sealed == 20
            assert (await get_checked(other, big, BIG_PAGE)).reasons == [HIT] * 20
            await daemon.settled()
            put = await other.put(big[:1], pages_of(big[:1], BIG_PAGE), durable="nvme")
            assert [(item.reason, item.durable) for item in put] == [(PutCode.EXISTS, False)]


@on_loop
async def test_no_more_pages_than_the_index_may_have_also_after_restarts(base: Path) -> None:
    """And as many puts into host memory as ever."""
    settings = ("nvme.pages_max=1024", "nvme.bytes=64MiB", "host.bytes=4MiB")
    size = 4096
    for boot in range(2):
        keys = keys_of(f"{boot}.{n}" for n in range(1100 if boot == 0 else 300))
        async with running(base, *settings) as daemon:
            ns = await daemon.namespace(size)
            if boot:
                assert daemon.counts(Tier.NVME).sealed == 1024
            for at in range(0, len(keys), 100):
                some = keys[at : at + 100]
                put = await ns.put(some, pages_of(some, size), durable="nvme", chain=False)
                assert {(item.reason, item.durable) for item in put} == {(PutCode.STORED, True)}
                assert daemon.counts(Tier.NVME).sealed <= 1024
            assert daemon.counts(Tier.NVME).sealed == 1024
            assert (await get_checked(ns, keys[-300:], size)).reasons == [HIT] * 300
