"""The directory's memory: sealed, taken when it is needed, given back; and its namespace words."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest

from kvtier.core.page import Tier
from kvtier.errors import LimitExceeded, TierIOError
from kvtier.testing.leaks import no_leaks
from kvtier.tiers.memfd import READ_ONLY_SEALS, create_read_only, found_seals
from kvtier.transfer.local.header import NAMESPACE_PROBES
from kvtier.transfer.local.lookup import DirectoryView
from tests.transfer.local.directory_parts import (
    BOOT_ID,
    KERNELS,
    directory,
    kernels_named,
    keys_of,
    rows_of,
)


def view(made, kernels="numpy"):
    return DirectoryView(made.fd, boot_id=BOOT_ID, kernels=kernels_named(kernels))


@pytest.mark.parametrize("kernels", KERNELS)
def test_namespaces_are_current_until_they_end(kernels):
    with directory(kernels=kernels, namespaces_max=300) as made, view(made, kernels) as seen:
        for number in range(1, 301):
            made.set_namespace(number, number % 5 + 1)
        assert all(seen.namespace_is_current(n, n % 5 + 1) for n in range(1, 301))
        assert not any(seen.namespace_is_current(n, n % 5 + 2) for n in range(1, 301))
        assert not seen.namespace_is_current(301, 1)
        # A bump: a new number.
        made.end_namespace(7)
        made.set_namespace(301, 4)
        assert not seen.namespace_is_current(7, 3)
        assert seen.namespace_is_current(301, 4)
        assert [made.end_namespace(7), made.end_namespace(9)] == [False, True]
        for number, generation in ((0, 1), (0, 0), (1, 0), (1 << 40, 1), (-1, 1), (1, 1 << 32)):
            assert not seen.namespace_is_current(number, generation)


@pytest.mark.parametrize("kernels", KERNELS)
def test_many_bumps_leave_room(kernels):
    """Every word is used again: 64 families that are bumped in turn, and 64 that never are."""
    count = 20_000 if kernels == "numba" else 3_000
    with directory(kernels=kernels, namespaces_max=128) as made, view(made, kernels) as seen:
        for number in range(1, 129):
            made.set_namespace(number, 1)
        for number in range(129, 129 + count):
            assert made.end_namespace(number - 64)
            made.set_namespace(number, 2)
        last = 128 + count
        assert all(seen.namespace_is_current(n, 1) for n in range(1, 65))
        assert all(seen.namespace_is_current(n, 2) for n in range(last - 63, last + 1))
        assert not seen.namespace_is_current(last - 64, 2)


def test_a_run_of_namespace_words_that_is_full_says_so():
    with directory(namespaces_max=1) as made:
        assert made.header.namespace_words == 512
        with pytest.raises(LimitExceeded, match="no word of the directory is free"):
            for number in range(1, 1000):
                made.set_namespace(number, 1)
        assert number > 512 - NAMESPACE_PROBES


def test_nobody_else_can_write_cut_or_unseal():
    with directory() as made:
        assert found_seals(made.fd) == READ_ONLY_SEALS
        size = os.fstat(made.fd).st_size
        assert size == made.header.file_bytes
        with pytest.raises(PermissionError):
            mmap.mmap(made.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        for attempt in (
            lambda: os.pwrite(made.fd, b"x", 0),
            lambda: os.ftruncate(made.fd, 0),
            lambda: os.ftruncate(made.fd, size + 4096),
            lambda: fcntl.fcntl(made.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                attempt()
        with mmap.mmap(made.fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as pages:
            assert pages[:8] == b"\x89KVTDIR\n"
        # The owner still can.
        assert made.put_many(rows_of(keys_of(1, 1), 1)).all()


@pytest.mark.parametrize("lost", ["F_SEAL_FUTURE_WRITE", "mmap"])
def test_a_seal_or_map_that_fails_leaves_nothing(monkeypatch, lost):
    real = fcntl.fcntl

    def forgetful(fd, command, argument=0):
        if command == fcntl.F_ADD_SEALS and argument & 0x10:
            return 0
        return real(fd, command, argument)

    def fail(*_):
        raise OSError(12, "Cannot allocate memory")

    with no_leaks(), monkeypatch.context() as patched:
        if lost == "mmap":
            patched.setattr("kvtier.tiers.memfd.mmap.mmap", fail)
        else:
            patched.setattr("kvtier.tiers.memfd.fcntl.fcntl", forgetful)
        with pytest.raises(TierIOError):
            create_read_only("x", 8192, tier=Tier.HOST)


def test_memory_is_taken_lazily() -> None:
    with directory(1 << 17) as made:
        assert made.header.file_bytes > 32 << 20
        assert os.fstat(made.fd).st_blocks * 512 < 64 << 10
