"""Devices note how far the daemon directory has got: one that hangs, or takes no note, costs no
other device its own, and no start more than some seconds.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from kvtier.daemon import device_notes, nvme, nvme_absent
from kvtier.errors import DirectoryError
from kvtier.tiers import nvme_directory
from kvtier.tiers.nvme_directory import DeviceDirectory, read_identity
from tests.faults.kinds_rig import Running, on_loop, running, until


@pytest.fixture(autouse=True)
def hurried():
    """The same, sooner."""
    with (
        mock.patch.object(device_notes, "_NOTE_S", 0.1),
        mock.patch.object(nvme, "_FILES_S", 0.02),
    ):
        yield


@contextmanager
def hanging(device: Path) -> Iterator[threading.Event]:
    """Its notes hang until this is set."""
    gate, note = threading.Event(), DeviceDirectory.note

    def hang(self: DeviceDirectory, noted) -> None:
        assert self.path != device or gate.wait(20)
        note(self, noted)

    with mock.patch.object(DeviceDirectory, "note", hang):
        try:
            yield gate
        finally:
            gate.set()


@contextmanager
def full(device: Path) -> Iterator[list[Path]]:
    """There is no room for a file of it; one item a try."""
    tries: list[Path] = []
    write = nvme_directory.write_sealed

    def refuse(path: Path, kind: bytes, payload: bytes) -> None:
        if path.parent != device:
            write(path, kind, payload)
            return
        tries.append(path)
        cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise DirectoryError(f"{path} cannot be written", remedy="Make room.") from cause

    with mock.patch.object(nvme_directory, "write_sealed", refuse):
        yield tries


def noted_journal(device: Path) -> int:
    identity = read_identity(device)
    assert identity is not None
    return identity.noted.journal


async def note_anew(daemon: Running, device: Path) -> int:
    """Begins a journal; its number, which the device has noted then."""
    durability = daemon.node.durability
    await durability.checkpoint()
    await until(lambda: noted_journal(device) == durability.number)
    return durability.number


@on_loop
async def test_a_device_that_hangs_keeps_no_other_from_noting(base):
    a, b = base / "a", base / "b"
    with hanging(a) as gate:
        async with running(base, f"nvme.paths={a},{b}") as daemon:  # READY all the same
            for _ in range(3):
                newest = await note_anew(daemon, b)
            assert noted_journal(a) == 0
            gate.set()
            await until(lambda: noted_journal(a) == newest)


@on_loop
async def test_a_device_that_hangs_does_not_keep_the_end_waiting(base):
    a, b = base / "a", base / "b"
    with hanging(a):
        async with running(base, f"nvme.paths={a},{b}") as daemon:
            daemon.stops = True
            newest = await note_anew(daemon, b)
    assert noted_journal(b) >= newest
    assert noted_journal(a) == 0


@on_loop
async def test_a_full_device_is_asked_again_after_retry_s_and_at_the_end(base):
    a, b = base / "a", base / "b"
    async with running(base, f"nvme.paths={a},{b}", "nvme.retry_s=3600") as daemon:
        before = noted_journal(a)
        with full(a) as tries:
            for _ in range(4):
                newest = await note_anew(daemon, b)
            assert len(tries) == 1
        assert noted_journal(a) == before < newest
        daemon.stops = True
    assert noted_journal(a) == noted_journal(b) >= newest


@on_loop
async def test_the_log_hears_once_of_a_device_that_takes_no_note(base, caplog):
    a, b = base / "a", base / "b"
    async with running(base, f"nvme.paths={a},{b}", "nvme.retry_s=0.05") as daemon:
        with full(a) as tries:
            newest = await note_anew(daemon, b)
            await until(lambda: len(tries) >= 3)
        await until(lambda: noted_journal(a) == newest)
    said = [record for record in caplog.records if record.msg == "nvme.device_not_noted"]
    assert [record.path for record in said] == [str(a)]
    assert "No space left" in said[0].reason


@on_loop
async def test_a_start_without_the_tier_asks_all_devices_at_once(base):
    """Each may take its time: one after the other they could take half a minute."""
    paths = [base / name for name in ("a", "b", "c")]
    named = f"nvme.paths={','.join(map(str, paths))}"
    async with running(base, named) as daemon:
        await daemon.node.durability.checkpoint()
    together, asked = threading.Barrier(len(paths)), []

    def look(path: Path):
        asked.append(path)
        together.wait(1.5)  # less than what one is waited for
        return read_identity(path)

    with mock.patch.object(nvme_absent, "read_identity", look):
        async with running(base, "nvme.paths="):
            assert sorted(asked) == paths
