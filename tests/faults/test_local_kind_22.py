"""Kind 22, INT32, on the local plane: slots, offsets, lengths, generations and sums of bytes beyond
what 31 and 32 bits hold, in an arena of 5 GiB that has memory only where pages lie.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fault_rig import metrics

import kvtier
from kvtier.packing.checksum import payload_sum
from kvtier.packing.record import record_bytes
from kvtier.testing.daemon_process import DaemonProcess
from kvtier.tiers.host import slab_layout
from kvtier.transfer.planes.deadline import Deadline
from tests.client.local_rig import (
    arena_fd,
    flip,
    opaque,
    pages_of,
    separate_keys,
    two_segments,
)
from tests.faults.local_crew import client, settled
from tests.faults.local_roles import PAGE, PAGES, common, granted
from tests.faults.sparse_serve import serving_slabs

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode
HIT, CORRUPT = GetCode.HIT, GetCode.CORRUPT

GIB = 1 << 30
ARENA = slab_layout(5 * GIB)
#: Those in use: the last ones, and those that bytes 2**31 and 2**32 lie in. The daemon fills the
#: last of them first, after one for its self-test.
SLABS = (
    *range(ARENA.count - 5, ARENA.count - 1),
    (1 << 31) // ARENA.slab_bytes,
    (1 << 32) // ARENA.slab_bytes,
    ARENA.count - 1,
)
#: A record of 1 MiB.
LARGE = (1 << 20) - 4096
#: What a client enters into its page tables at once.
CHUNK = 64 << 10


@pytest.fixture(scope="module")
def far() -> Iterator[DaemonProcess]:
    """A daemon with an arena of 5 GiB."""
    base = Path(tempfile.mkdtemp(prefix="kvt-"))
    settings = ("host.bytes=5GiB", "local.grant_ms=1000", "daemon.metrics_listen=127.0.0.1:0")
    with DaemonProcess(base, *settings, prefix=serving_slabs(*SLABS)) as daemon:
        yield daemon
    shutil.rmtree(base)


@pytest.fixture(scope="module")
def stored(far: DaemonProcess) -> tuple[list[bytes], np.ndarray, kvtier.PutResult]:
    """Pages around 2 GiB, around 4 GiB and above."""
    with client(far, layout=opaque(LARGE)) as (kv, ns):
        keys = separate_keys(ns, 0, 136)
        pages = pages_of(keys, LARGE)
        put = ns.put(keys, pages, chain=False)
        assert put.reasons == [PutCode.STORED] * len(keys)
        assert (kv.local.puts.stored, kv.local.puts.left) == (len(keys), 0)
    return keys, pages, put


def written(pid: int) -> list[tuple[int, int]]:
    """Where the arena has memory: ranges of bytes."""
    fd, at, found = arena_fd(pid), 0, []
    try:
        while True:
            begin = os.lseek(fd, at, os.SEEK_DATA)
            at = os.lseek(fd, begin, os.SEEK_HOLE)
            found.append((begin, at))
    except OSError as error:
        if error.errno != errno.ENXIO:  # there is no more
            raise
        return found
    finally:
        os.close(fd)


def test_kind_22_int32_puts_and_gets_beyond_4_gib(far, stored):
    keys, pages, put = stored
    begins = [item.ref.slot * 4096 for item in put]
    generations = [item.ref.generation for item in put]
    assert len(set(begins)) == len(set(generations)) == len(keys)
    assert min(generations) < 1 << 32 < max(generations)
    for edge in (1 << 31, 1 << 32):
        assert any(begin < edge < begin + record_bytes(LARGE) for begin in begins)
    assert sum(begin > 1 << 32 for begin in begins) > 40
    is_used = np.zeros(5 * GIB // CHUNK + 1, np.bool_)
    for slab in SLABS:
        begin, end = slab * ARENA.slab_bytes, (slab + 1) * ARENA.slab_bytes
        is_used[begin // CHUNK : -(-end // CHUNK)] = True
    for begin, end in written(far.pid):
        assert is_used[begin // CHUNK : -(-end // CHUNK)].all(), f"{begin:#x} to {end:#x}"
    with client(far, layout=opaque(LARGE)) as (kv, ns):
        got = ns.get(keys)
        assert got.reasons == [HIT] * len(keys)
        assert all(found == page.data for found, page in zip(got.pages, pages, strict=True))
        assert [item.ref for item in got] == [item.ref for item in put]
        assert (kv.local.counts.hits, kv.local.counts.sums_failed) == (len(keys), 0)
        # They are there already, and are not written again.
        assert ns.put(keys, pages, chain=False).reasons == [PutCode.EXISTS] * len(keys)
        assert kv.local.puts.existed == len(keys)
    with kvtier.connect(far.url, deadline=10, plane="grpc") as kv:  # the daemon reads them so, too
        got = kv.namespace(opaque(LARGE)).get(keys[:40])
        assert [bytes(page) for page in got.pages] == [page.tobytes() for page in pages[:40]]


def arena_maps() -> list[tuple[int, int]]:
    """Where this process has the arena."""
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    ends = [line.split()[0].split("-") for line in lines if "/memfd:kvtier-arena" in line]
    return [(int(begin, 16), int(end, 16)) for begin, end in ends]


def test_kind_22_int32_leases_beyond_4_gib(far, stored):
    keys, pages, put = stored
    chosen = [at for at, item in enumerate(put) if item.ref.slot * 4096 > 1 << 32][:8]
    with client(far, layout=opaque(LARGE)) as (_, ns):
        ((base, end),) = arena_maps()
        assert end - base == ARENA.slab_bytes * ARENA.count > 1 << 32
        with ns.lease([keys[at] for at in chosen]) as held:
            views = held.views()
            assert held.in_place == [True] * 8
            for view, at in zip(views, chosen, strict=True):
                begin = np.frombuffer(view, np.uint8).ctypes.data - base
                assert begin == (put[at].ref.slot + 1) * 4096 > 1 << 32
                assert view == pages[at].data
            assert held.verify() == [HIT] * 8
            flip(far.pid, put[chosen[3]].ref.slot, LARGE - 1)
            assert held.verify() == [HIT] * 3 + [CORRUPT] + [HIT] * 4
            del view, views
        # One byte beyond 4 GiB, on the way of a get: that page and no other.
        flip(far.pid, put[chosen[5]].ref.slot, 0)
        codes = ns.get([keys[at] for at in chosen]).reasons
        assert codes == [HIT] * 3 + [GetCode.MISS, HIT, CORRUPT] + [HIT] * 2


def test_kind_22_int32_tensors_beyond_4_gib(far, stored):
    pytest.importorskip("torch")
    keys, pages, put = stored
    at = next(at for at, item in reversed(list(enumerate(put))) if item.ref.slot >= 1 << 20)
    with client(far, layout=opaque(LARGE)) as (_, ns):
        ((base, _),) = arena_maps()
        with ns.lease([keys[at]]) as held:
            (found,) = held.tensors()
            assert held.in_place == [True]
            assert found["o"].data_ptr() - base == (put[at].ref.slot + 1) * 4096
            assert np.array_equal(found["o"].numpy().reshape(-1), pages[at])
            assert held.verify() == [HIT]
            del found


@contextmanager
def folded(nbytes: int, count: int) -> Iterator[np.ndarray]:
    """`count` rows of `nbytes` one behind the other, which are all the same memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    fd = os.memfd_create("folded")
    os.ftruncate(fd, count * nbytes)  # which takes no memory
    pages = mmap.mmap(fd, count * nbytes)
    try:
        rows = np.frombuffer(pages, np.uint8).reshape(count, nbytes)
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        for row in rows:
            at, fixed = row.ctypes.data, 0x10  # MAP_FIXED
            assert libc.mmap(at, nbytes, rights, mmap.MAP_SHARED | fixed, fd, 0) == at
        yield rows
    finally:
        del row, rows
        pages.close()
        os.close(fd)


def test_kind_22_int32_one_get_of_more_than_4_gib(far):
    """The same page 65 times, one behind the other: places, counts and sums of bytes."""
    layout, count = two_segments(layers=64, heads=64, dim=1024), 65
    nbytes = layout.raw_bytes
    assert nbytes == 64 << 20
    with client(far, layout=layout, deadline=60) as (kv, ns):
        (key,) = ns.keys(range(4))
        page = np.random.default_rng(22).integers(0, 256, nbytes, np.uint8)
        assert ns.put([key], [page]).reasons == [PutCode.STORED]
        assert (kv.local.puts.stored, kv.local.puts.left) == (1, 0)
        before, sent = kv.status().counters, metrics(far)["kvtier_sent_bytes_total"]
        with folded(nbytes, count) as out:
            assert out.nbytes > 1 << 32
            assert ns.get([key] * count, out=out).reasons == [HIT] * count
            assert np.array_equal(out[-1], page)
            del out  # which keeps it mapped
        assert (kv.local.counts.hits, kv.local.counts.left) == (count, 0)
        settled(lambda: metrics(far)["kvtier_sent_bytes_total"] > sent)
        assert metrics(far)["kvtier_sent_bytes_total"] - sent == count * nbytes
        after = kv.status().counters
        assert after["get_hit"] - before.get("get_hit", 0) == count


def test_kind_22_int32_counts_of_what_was_used(far):
    """As much as one frame can claim, told twice."""
    with client(far) as (kv, ns):
        link, number = (
            kv._async.link.local._standing.attached.reads.link,
            ns._async.opened.namespace_number,
        )
        before, sent = kv.status().counters, metrics(far)["kvtier_sent_bytes_total"]
        for _ in range(2):
            link.note_lookup(number, 0, hits=1 << 32, misses=(1 << 32) - 1)
            link.note_get(number, 0, [], nbytes=1 << 48, misses=1 << 32)
            assert not link.tell()
        settled(lambda: metrics(far)["kvtier_sent_bytes_total"] - sent == 1 << 49)
        after = kv.status().counters
        for name, most in (
            ("lookup_hits", 1 << 33),
            ("lookup_misses", (1 << 33) - 2),
            ("get_miss", 1 << 33),
        ):
            assert after[name] - before.get(name, 0) == most
        assert kv.local.is_attached


@pytest.fixture
def by_hand(far):
    """A client, and a writer whose frames are made here."""
    with client(far) as (kv, ns):
        writer, grants = granted(kv, ns)
        yield kv, ns, writer, grants
        writer.close()
        del writer._arena  # pytest keeps what it gave


def sealed(ns, writer, number, grant, *, length=PAGE, generation=0) -> PutCode:
    """Writes a page to a slot and names it, with its grant's generation unless told otherwise."""
    at = int(writer.targets([grant], PAGE)[0]) - writer._address
    writer._arena[at : at + PAGE] = np.frombuffer(PAGES.page(number), np.uint8)
    opened = ns._async.opened
    made = payload_sum(
        PAGES.page(number),
        key=PAGES.key(number),
        fingerprint=opened.fingerprint,
        namespace_generation=opened.generation,
        shard=0,
        codec=kvtier.Codec.RAW,
        length=PAGE,
    )
    writer.send(
        common(ns, length),
        Deadline.after(5),
        keys=PAGES.key(number),
        parents=bytes(32),
        depths=bytes(4),
        sums=made,
        generations=(generation or grant.generation).to_bytes(8, "little"),
    )
    return PutCode(writer.receive(Deadline.after(5)).codes[0])


def test_kind_22_int32_writes_whose_numbers_are_too_high(by_hand):
    """Lengths and generations that are right in their lower 32 bits are wrong all the same."""
    kv, ns, writer, grants = by_hand
    grants = [grant for grant in grants if grant.slot >= 1 << 20]
    for length in (PAGE + (1 << 32), PAGE + (1 << 47), 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 48):
        assert sealed(ns, writer, 1, grants.pop(), length=length) is PutCode.REFUSED, length
    grant = grants.pop()
    assert grant.generation > 1 << 32
    for high in (1 << 32, 1 << 33, 1 << 63):
        wrong = grant.generation ^ high
        assert sealed(ns, writer, 1, grant, generation=wrong) is PutCode.STALE_GENERATION, high
    writer.send(common(ns, PAGE + (1 << 32)), Deadline.after(5), wanted=4)
    assert writer.receive(Deadline.after(5)).slots == b""
    assert ns.lookup([PAGES.key(1)]).hits == 0
    assert sealed(ns, writer, 1, grant) is PutCode.STORED
    assert PAGES.get(ns, [1]) == [HIT]
    assert ns.get([PAGES.key(1)])[0].ref.generation == grant.generation
    assert kv.local.counts.hits == 2


@pytest.mark.parametrize(
    ("name", "value"), [("length", 1 << 63), ("length", (1 << 48) + 1), ("namespace", 1 << 32)]
)
def test_kind_22_int32_numbers_that_no_frame_has(by_hand, name, value):
    """The writer is cut off; the daemon and everybody else go on."""
    kv, ns, writer, _ = by_hand
    pages = {"length": PAGE, "namespace": ns._async.opened.namespace_number}
    pages[name] = value if name == "length" else pages[name] + value
    wrong = replace(common(ns), **pages)
    writer.send(wrong, Deadline.after(5), wanted=1)
    with pytest.raises(kvtier.DaemonUnavailable, match=str(value) if name == "length" else "shard"):
        writer.receive(Deadline.after(5))
    assert kv.local.is_attached
    PAGES.put(ns, [2], durable=False)
    assert PAGES.get(ns, [2]) == [HIT]
