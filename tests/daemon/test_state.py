"""The daemon directory: one owner, nothing lost, nothing used twice, damage never passed over."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.daemon.state import new_boot_id, open_directory
from kvtier.errors import DirectoryError
from kvtier.tiers import nvme_state, sealed_file
from kvtier.tiers.nvme_checkpoint import oldest_number
from kvtier.tiers.nvme_lengths import read_lengths
from kvtier.tiers.nvme_state import read_file
from kvtier.tiers.sealed_file import read_sealed, write_sealed

BLOCK = 1 << 20
STATE_FILES = ("format", "generations", "namespaces")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


# -- sealed files ---------------------------------------------------------------------------------


def test_a_sealed_file_round_trips_and_replaces(tmp_path):
    file = tmp_path / "f"
    assert read_sealed(file, b"kind") is None
    for payload in (b"", b"one", b"x" * 100_000):
        write_sealed(file, b"kind", payload)
        assert read_sealed(file, b"kind") == payload
    assert [item.name for item in tmp_path.iterdir()] == ["f"], "no temporary file stays"
    assert file.stat().st_mode & 0o777 == 0o600


def test_every_flipped_byte_and_every_cut_is_seen(tmp_path):
    file = tmp_path / "f"
    write_sealed(file, b"kind", b"payload")
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DirectoryError, match="is damaged"):
            read_sealed(file, b"kind")
        file.write_bytes(whole[:at])
        with pytest.raises(DirectoryError, match="is damaged"):
            read_sealed(file, b"kind")
    file.write_bytes(whole + b"\0")
    with pytest.raises(DirectoryError, match="is damaged"):
        read_sealed(file, b"kind")
    file.write_bytes(whole)
    with pytest.raises(DirectoryError, match="not a file of this kind"):
        read_sealed(file, b"other")


def test_a_full_disk_is_a_directory_error(tmp_path, monkeypatch):
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DirectoryError, match="No space left"):
        write_sealed(tmp_path / "f", b"kind", b"payload")


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize("make", [a_fifo, a_socket, Path.mkdir])
def test_what_is_no_file_is_refused_and_not_waited_for(path, make):
    """A fifo without a writer holds up whoever opens it as a file."""
    readers = dict.fromkeys((*STATE_FILES, "lock"), open_directory) | {
        "journals": lambda at: read_lengths(at, bytes(16)),
        "checkpoint": oldest_number,
        "journal-0000000001": lambda at: read_file(at / "journal-0000000001"),
    }
    for name, reader in readers.items():
        open_directory(path).close()
        (path / name).unlink(missing_ok=True)
        make(path / name)
        with pytest.raises(DirectoryError, match=f"{name} .*(not a regular file|Is a directory)"):
            reader(path)
        shutil.rmtree(path)


@pytest.mark.parametrize("name", ["generations", "checkpoint"])
@pytest.mark.parametrize(
    ("number", "wanted", "unwanted"),
    [
        (errno.EACCES, "Give the daemon's user", "--discard-cache"),
        (errno.EPERM, "Give the daemon's user", "SMART"),
        (errno.EIO, "SMART", "chown"),
    ],
)
def test_the_remedy_for_a_file_that_cannot_be_read(
    path, monkeypatch, name, number, wanted, unwanted
):
    def failing(path: Path) -> bytes:
        raise OSError(number, os.strerror(number))

    module, read = (
        (nvme_state, nvme_state.read_file)
        if name == "checkpoint"
        else (sealed_file, lambda at: read_sealed(at, b"gens"))
    )
    monkeypatch.setattr(module, "read_plain", failing)
    with pytest.raises(DirectoryError, match=f"{name} cannot be read: ") as caught:
        read(path / name)
    assert wanted in caught.value.remedy
    assert unwanted not in caught.value.remedy
    assert (str(path / name) in caught.value.remedy) == (number != errno.EIO)


def test_an_open_makes_last_what_a_killed_process_has_only_put_in_its_place(path, monkeypatch):
    """Before anything is written that goes on from it."""
    open_directory(path).close()
    synced, fsync = [], os.fsync

    def note(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    with open_directory(path) as directory:
        assert synced == [path.stat().st_ino]
        synced.clear()
    with open_directory(path, read_only=True):
        assert synced == [], "a look changes nothing"
    assert directory.path == path


def test_what_lies_in_the_way_of_a_new_version_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "f.tmp")
    write_sealed(tmp_path / "f", b"kind", b"payload")
    assert read_sealed(tmp_path / "f", b"kind") == b"payload"


# -- the directory --------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_a_new_directory_is_private(path, umask):
    before = os.umask(umask)
    try:
        open_directory(path).close()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o700
    for item in path.iterdir():
        assert item.stat().st_mode & 0o077 == 0, item


def test_generations_and_namespaces_survive(path):
    with open_directory(path) as directory:
        assert directory.generation_bound == 0
        assert directory.load_namespaces() == {}
        directory.journal_generations(BLOCK)
        directory.save_namespaces({"last_number": 7, "families": [{"fingerprint": b"\xff"}]})
    with open_directory(path) as directory:
        assert directory.generation_bound == BLOCK
        assert directory.load_namespaces() == {
            "last_number": 7,
            "families": [{"fingerprint": b"\xff"}],
        }


def test_the_bound_only_rises(path):
    with open_directory(path) as directory:
        directory.journal_generations(5)
        for bound in (5, 4, 0):
            with pytest.raises(ValueError, match="does not rise"):
                directory.journal_generations(bound)
        assert directory.generation_bound == 5


def test_a_second_daemon_is_refused_by_pid(path):
    with open_directory(path):
        with pytest.raises(DirectoryError) as caught:
            open_directory(path)
        assert str(path) in str(caught.value)
        assert f"pid {os.getpid()}" in str(caught.value)
    open_directory(path).close()


@pytest.mark.parametrize("name", STATE_FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing"])
def test_damage_is_loud_and_changes_nothing(path, name, damage):
    """Never a silent start from generation zero."""
    with open_directory(path) as directory:
        directory.journal_generations(BLOCK)
        directory.save_namespaces({"last_number": 1})
    file = path / name
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        flipped = whole[:-1] + bytes([whole[-1] ^ 1])
        file.write_bytes({"flip": flipped, "cut": whole[:-1], "empty": b""}[damage])
    before = {item.name: item.read_bytes() for item in path.iterdir() if item.name != "lock"}
    with pytest.raises(DirectoryError) as caught:
        open_directory(path)
    assert name in str(caught.value)
    assert caught.value.remedy
    after = {item.name: item.read_bytes() for item in path.iterdir() if item.name != "lock"}
    assert after == before
    # The lock was let go: once repaired, it opens.
    file.write_bytes(whole)
    with open_directory(path) as directory:
        assert directory.generation_bound == BLOCK


def test_another_format_version_is_refused(path):
    open_directory(path).close()
    write_sealed(path / "format", b"format", (3).to_bytes(4, "little"))
    with pytest.raises(DirectoryError, match="version 3, this daemon knows versions 1 and 2") as no:
        open_directory(path)
    assert "--discard-cache" in no.value.remedy
    with open_directory(path, discard_cache=True) as directory:
        assert directory.generation_bound == 0


def test_a_directory_of_the_version_before_is_taken_over(path):
    with open_directory(path) as directory:
        directory.journal_generations(BLOCK)
    write_sealed(path / "format", b"format", (1).to_bytes(4, "little"))
    with open_directory(path) as directory:
        assert directory.generation_bound == BLOCK
    assert read_sealed(path / "format", b"format") == (2).to_bytes(4, "little")


def test_discarding_removes_what_is_ours_alone(path):
    with open_directory(path) as directory:
        directory.journal_generations(BLOCK)
        directory.save_namespaces({"a": 1})
    for name in ("geometry", "checkpoint", "checkpoint.old", "journal-0000000001", "notes.txt"):
        (path / name).write_text("x")
    with pytest.raises(DirectoryError, match=r"not empty \(notes.txt"):
        open_directory(path, discard_cache=True)
    (path / "notes.txt").unlink()
    with open_directory(path, discard_cache=True) as directory:
        assert directory.generation_bound == 0
        assert directory.load_namespaces() == {}
    assert sorted(item.name for item in path.iterdir()) == [
        "format", "generations", "lock", "namespaces",
    ]  # fmt: skip


def test_an_interrupted_first_start_goes_on(path):
    """A crash before `format` was written left nothing that was ever used."""
    open_directory(path).close()
    (path / "format").unlink()
    open_directory(path).close()
    (path / "format").unlink()
    (path / "namespaces").unlink()
    with open_directory(path) as directory:
        assert directory.generation_bound == 0


def test_a_directory_of_something_else_is_left_alone(path):
    path.mkdir(mode=0o700)
    (path / "thesis.tex").write_text("x")
    with pytest.raises(DirectoryError, match=r"not a daemon directory and not empty \(thesis.tex"):
        open_directory(path)
    assert (path / "thesis.tex").read_text() == "x"


def test_temporary_files_of_a_crash_are_removed(path):
    open_directory(path).close()
    (path / "generations.tmp").write_bytes(b"half")
    open_directory(path).close()
    assert not (path / "generations.tmp").exists()


def test_a_directory_open_to_others_is_refused(path):
    path.mkdir(mode=0o700)
    path.chmod(0o750)
    with pytest.raises(DirectoryError, match="mode 0750") as caught:
        open_directory(path)
    assert (
        caught.value.remedy
        == "Name a directory of the daemon's own, which is then made with mode 0700."
    )


def test_no_directory_there_or_possible(path, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DirectoryError, match="is not a directory"):
        open_directory(file)
    with pytest.raises(DirectoryError):
        open_directory(file / "below")
    with pytest.raises(DirectoryError):
        open_directory(Path("/proc/kvtier"))


def test_boot_ids_are_63_random_bits_and_never_zero():
    ids = {new_boot_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(0 < boot_id < 1 << 63 for boot_id in ids)


COUNTER = """
import sys
from pathlib import Path
from kvtier.core import generations
from kvtier.core.generations import Generations
from kvtier.daemon.state import open_directory
generations.BLOCK = 3  # many journal writes
directory = open_directory(Path(sys.argv[1]))
numbers = Generations(directory.generation_bound, directory.journal_generations)
while True:
    sys.stdout.buffer.write(b"%d\\n" % numbers.next())
    sys.stdout.buffer.flush()
"""


@pytest.mark.leaks_allowed("the last SIGKILL may leave a temporary file, as it may in life")
def test_sigkill_at_any_moment_never_repeats_a_generation(path):
    seed = 20260731
    rng = random.Random(seed)
    highest = 0
    for round_no in range(12):
        with subprocess.Popen(
            [sys.executable, "-c", COUNTER, str(path)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            time.sleep(rng.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            seen = [int(line) for line in (first + process.stdout.read()).splitlines(True)
                    if line.endswith(b"\n")]  # fmt: skip
        assert seen, f"seed {seed} round {round_no}"
        assert seen[0] > highest, f"seed {seed} round {round_no}: {seen[0]} after {highest}"
        assert seen == list(range(seen[0], seen[0] + len(seen)))
        highest = seen[-1]


def test_a_directory_that_was_removed_is_not_written_by_its_old_daemon(path):
    with open_directory(path) as old:
        shutil.rmtree(path)
        with pytest.raises(DirectoryError, match="it was removed"):
            old.save_namespaces({})
        with open_directory(path) as new:
            new.journal_generations(1 << 20)
            with pytest.raises(DirectoryError, match="it was removed"):
                old.journal_generations(5)
        with open_directory(path) as again:
            assert again.generation_bound == 1 << 20
