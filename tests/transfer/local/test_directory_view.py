"""A reader of a directory that is damaged, hostile, of another boot, gone, or half written."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvtier.core.page import Tier
from kvtier.errors import (
    ClientClosed,
    DirectoryError,
    ForkedClient,
    KeyLengthError,
    LimitExceeded,
    TierIOError,
    UnknownHandle,
)
from kvtier.testing.leaks import no_leaks
from kvtier.tiers.memfd import create_sealed
from kvtier.transfer.local.entry import BUSY, EMPTY
from kvtier.transfer.local.header import OPEN_WORD, SHIFTS_WORD, header_for
from kvtier.transfer.local.loading import agrees, load_kernels
from kvtier.transfer.local.lookup import DirectoryView
from kvtier.transfer.local.protocol import DOUBT, HIT, MISS, READS_MAX
from kvtier.transfer.local.vectors import NumpyKernels
from tests.transfer.local.directory_parts import (
    BOOT_ID,
    KERNELS,
    NAMESPACE,
    SHARD,
    content,
    directory,
    forged,
    kernels_named,
    keys_of,
    rows_of,
)

#: In numpy such a table takes a second.
HOSTILE = [pytest.param("numba", seed, marks=KERNELS[0].marks) for seed in range(4)]
HOSTILE.append(("numpy", 4))
WHERE = {"namespace": NAMESPACE, "shard": SHARD}


def attached(fd, kernels="numpy"):
    return DirectoryView(fd, boot_id=BOOT_ID, kernels=kernels_named(kernels))


def filled(count=40, seed=1):
    """(bytes of a directory with so many entries, their keys)."""
    keys = keys_of(seed, count)
    with directory(64) as made:
        made.set_namespace(NAMESPACE, 1)
        made.put_many(rows_of(keys, np.arange(1, count + 1)))
        return content(made), keys


def place_of(data: bytes, key: np.ndarray) -> int:
    """Where in the file the entry of a key begins."""
    return data.index(key.tobytes(), 8192)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 33, 63, 64, 65, 1000])
def test_any_number_of_keys(kernels, count):
    keys = keys_of(count, max(count, 1))
    with directory(1000) as made, attached(made.fd, kernels) as seen:
        made.put_many(rows_of(keys[::2], 5))
        found = seen.lookup(keys[:count], **WHERE)
        assert found.hits.tolist() == [number % 2 == 0 for number in range(count)]
        assert found.entries[::2, 5].tolist() == [5] * len(found.entries[::2])


def test_what_is_asked_for_is_checked():
    with directory() as made, attached(made.fd) as seen:
        with pytest.raises(KeyLengthError):
            seen.lookup([b"short"], **WHERE)
        with pytest.raises(LimitExceeded):
            seen.lookup([bytes(32)], namespace=1, shard=-1)


def test_a_file_without_the_seals_is_refused():
    data, _ = filled()
    fd = create_sealed("kvtier-forged", len(data), tier=Tier.HOST)
    try:
        os.pwrite(fd, data, 0)
        with no_leaks(), pytest.raises(DirectoryError, match="lacks the seals 0x10"):
            attached(fd)
    finally:
        os.close(fd)


def test_what_is_no_memfd_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(bytes(8192))
    reading, writing = os.pipe()
    for fd in (os.open(tmp_path / "file", os.O_RDONLY), reading, writing):
        with pytest.raises(DirectoryError, match="no directory here"):
            attached(fd)
        os.close(fd)
    with pytest.raises(DirectoryError, match="Bad file descriptor"):
        attached(writing)


@pytest.mark.parametrize("size", [0, 64, 4096])
def test_a_file_of_another_size_is_refused(size):
    data, _ = filled()
    if size == 0:
        data += bytes(4096)
    else:
        data = data[:size]
    with forged(data) as (fd, _pages), no_leaks(), pytest.raises(DirectoryError, match="bytes"):
        attached(fd)


def test_a_directory_of_another_boot_is_refused():
    with directory(boot_id=BOOT_ID + 1) as made, no_leaks():
        with pytest.raises(UnknownHandle, match="is of boot") as caught:
            attached(made.fd)
        assert "restarted" in caught.value.remedy


def test_a_map_that_the_system_refuses(monkeypatch):
    def fail(*_):
        raise OSError(12, "Cannot allocate memory")

    with directory() as made, no_leaks(), monkeypatch.context() as patched:
        patched.setattr("kvtier.tiers.memfd.mmap.mmap", fail)
        with pytest.raises(DirectoryError, match="cannot be mapped: Cannot allocate memory"):
            attached(made.fd)


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_entry_that_is_being_written_is_a_doubt(kernels):
    data, keys = filled()
    with forged(data) as (fd, pages), attached(fd, kernels) as seen:
        whole = seen.lookup(keys, **WHERE)
        at = place_of(data, keys[0])
        mix = pages[at + 120 : at + 128]
        pages[at + 120 : at + 128] = struct.pack("<Q", BUSY)
        found = seen.lookup(keys, **WHERE)
        assert found.codes.tolist() == [DOUBT] + [HIT] * 39
        assert not found.entries[0].any()
        assert (seen.torn_reads, seen.doubts) == (READS_MAX, 1)
        assert seen.recheck(whole).tolist() == [False] + [True] * 39
        pages[at + 120 : at + 128] = mix
        assert seen.lookup(keys, **WHERE).hits.all()
        assert seen.recheck(whole).all()
        assert (seen.torn_reads, seen.doubts) == (READS_MAX, 1)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("word", [4, 5, 6, 7, 8, 9, 10, 11, 14, 15])
def test_a_mixture_of_two_entries_is_no_hit(kernels, word):
    """One generation's words but one, of the next: as when the reader is between two stores."""
    data, keys = filled()
    with directory(64) as made:
        made.put_many(rows_of(keys, 99))
        newer = content(made)
    with forged(data) as (fd, pages), attached(fd, kernels) as seen:
        whole = seen.lookup(keys, **WHERE)
        at, other = place_of(data, keys[0]) + 8 * word, place_of(newer, keys[0]) + 8 * word
        pages[at : at + 8] = (
            newer[other : other + 8]
            if newer[other : other + 8] != pages[at : at + 8]
            else struct.pack("<Q", 1 << 60)
        )
        found = seen.lookup(keys, **WHERE)
        assert found.codes.tolist() == [DOUBT] + [HIT] * 39
        assert seen.recheck(whole).tolist() == [False] + [True] * 39


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_miss_while_entries_are_moved_is_a_doubt(kernels):
    data, keys = filled()
    others = keys_of(2, 10)
    with forged(data) as (fd, pages), attached(fd, kernels) as seen:
        pages[SHIFTS_WORD * 8 : SHIFTS_WORD * 8 + 8] = struct.pack("<Q", 7)
        assert seen.lookup(keys, **WHERE).hits.all()
        assert seen.doubts == 0
        assert seen.lookup(others, **WHERE).codes.tolist() == [DOUBT] * 10
        assert seen.doubts == 10
        pages[SHIFTS_WORD * 8 : SHIFTS_WORD * 8 + 8] = struct.pack("<Q", 8)
        assert seen.lookup(others, **WHERE).codes.tolist() == [MISS] * 10


@pytest.mark.parametrize("kernels", KERNELS)
def test_any_flipped_bit_of_an_entry_is_no_hit(kernels):
    data, keys = filled(1)
    at = place_of(data, keys[0])
    with forged(data) as (fd, pages), attached(fd, kernels) as seen:
        for bit in range(0, 1024, 1 if kernels == "numba" else 11):
            pages[at + bit // 8] ^= 1 << bit % 8
            assert seen.lookup(keys, **WHERE).codes[0] != HIT, bit
            pages[at + bit // 8] ^= 1 << bit % 8
        assert seen.lookup(keys, **WHERE).hits.all()


@pytest.mark.parametrize("kind", ["random", "busy", "no empty entry", "sparse"])
@pytest.mark.parametrize(("kernels", "seed"), HOSTILE)
def test_a_hostile_table_gives_misses(kernels, kind, seed):
    data = bytearray(filled()[0])
    header = header_for(pages_max=64, namespaces_max=8, boot_id=BOOT_ID, hash_seed=1)
    draw = np.random.default_rng(seed)
    words = np.frombuffer(data, np.uint64)[512:]
    words[:] = draw.integers(0, 2**64, len(words), np.uint64)
    entries = words[header.entries_offset // 8 - 512 :].reshape(-1, 16)
    if kind == "busy":
        entries[:, 15] = BUSY
    elif kind == "no empty entry":
        # The first word of a key that is asked for, in every entry.
        entries[:, 0] = 42
    elif kind == "sparse":
        entries[draw.random(len(entries)) < 0.7] = EMPTY
    wanted = np.concatenate([entries[:, :4], draw.integers(0, 2**64, (50, 4), np.uint64)])
    wanted[-20:, 0] = 42
    with forged(bytes(data)) as (fd, _pages), attached(fd, kernels) as seen:
        found = seen.lookup(np.ascontiguousarray(wanted).view(np.uint8), **WHERE)
        assert not found.hits.any()
        found.codes[:] = HIT
        found.places[:] = draw.integers(-(2**63), 2**63, len(wanted), np.int64)
        found.words[:] = draw.integers(0, 2**64, len(found.words), np.uint64)
        assert not seen.recheck(found).any()
        for number in range(1, 200):
            assert not seen.namespace_is_current(number, 1)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_directory_that_is_closed_or_not_open_yet(kernels):
    data, keys = filled()
    with forged(data) as (fd, pages), attached(fd, kernels) as seen:
        pages[OPEN_WORD * 8] = 0
        assert not seen.is_open
        assert not seen.lookup(keys, **WHERE).codes.any()
        assert not seen.namespace_is_current(NAMESPACE, 1)
        pages[OPEN_WORD * 8] = 1
        assert seen.lookup(keys, **WHERE).hits.all()


def test_a_closed_view_says_so():
    with directory() as made:
        seen = attached(made.fd)
        found = seen.lookup(keys_of(1, 2), **WHERE)
        seen.close()
        seen.close()
        for use in (
            lambda: seen.lookup(keys_of(1, 2), **WHERE),
            lambda: seen.recheck(found),
            lambda: seen.namespace_is_current(1, 1),
            lambda: seen.is_open,
        ):
            with pytest.raises(ClientClosed):
                use()


@pytest.mark.parametrize("kernels", KERNELS)
def test_close_while_other_threads_look(kernels):
    keys = keys_of(3, 500)
    with directory(512) as made, no_leaks():
        made.put_many(rows_of(keys, 1))
        seen = attached(made.fd, kernels)
        ended = []

        def look() -> None:
            try:
                while seen.lookup(keys, **WHERE).hits.all():
                    pass
            except ClientClosed:
                ended.append(True)

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        threading.Event().wait(0.05)
        seen.close()
        for thread in threads:
            thread.join(10)
        assert ended == [True] * 3


def test_a_child_process_gets_an_error_and_no_crash():
    with directory() as made, attached(made.fd) as seen:
        made.put_many(rows_of(keys_of(1, 2), 1))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                seen.lookup(keys_of(1, 2), **WHERE)
            except ForkedClient:
                try:
                    made.put_many(rows_of(keys_of(1, 2), 2))
                except TierIOError:
                    seen.close()
                    made.close()
                    code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert seen.lookup(keys_of(1, 2), **WHERE).entries[:, 5].tolist() == [1, 1]


def test_the_descriptor_may_be_closed_after_attaching():
    with directory() as made:
        made.put_many(rows_of(keys_of(1, 2), 1))
        fd = os.dup(made.fd)
        with attached(fd) as seen:
            os.close(fd)
            assert seen.lookup(keys_of(1, 2), **WHERE).hits.all()


def test_importing_loads_no_compiler():
    code = (
        "import sys, kvtier.transfer.local.lookup, kvtier.transfer.local.directory;"
        "sys.exit('numba' in sys.modules or 'grpc' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_compiled_implementation_is_taken_where_it_is_installed():
    pytest.importorskip("numba", reason="numba is not installed")
    assert load_kernels().name == "numba"
    assert agrees(load_kernels())


@pytest.mark.parametrize(
    ("before", "variables"),
    [
        ("import sys; sys.modules['numba'] = None", {}),
        ("", {"NUMBA_DISABLE_JIT": "1"}),
        ("", {"NUMBA_NUM_THREADS": "0"}),
    ],
    ids=["absent", "turned off", "set up wrongly"],
)
def test_without_a_numba_that_works_numpy_does_it(tmp_path, before, variables):
    code = f"""{before}
import kvtier
kvtier.warm_up()
from kvtier.packing.bulk_sums import load_summer
from kvtier.packing.fp8 import backend
from kvtier.transfer.local.loading import load_kernels
print(load_kernels().name, load_summer().name, backend().value)"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **variables, "NUMBA_CACHE_DIR": str(tmp_path)},
    )
    assert (done.returncode, done.stdout.split()) == (0, ["numpy", "xxhash", "torch"]), done.stderr


class Stale(NumpyKernels):
    """What a cache of another version could come to."""

    def probe(self, table, keys, name, found):
        return super().probe(table, keys ^ np.uint64(1), name, found)


def test_an_implementation_that_differs_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr("kvtier.transfer.local.loading.load_compiled", Stale)
    assert type(load_kernels.__wrapped__()) is NumpyKernels
    assert [record.event for record in caplog.records] == ["local.kernels.stale_cache"]


def test_a_broken_numba_is_passed_over(monkeypatch, caplog):
    def fail():
        raise ImportError("Numba needs another NumPy")

    monkeypatch.setattr("kvtier.transfer.local.loading.load_compiled", fail)
    assert load_kernels.__wrapped__().name == "numpy"
    assert [record.event for record in caplog.records] == ["local.kernels.no_numba"]
