"""`kvtier fsck` and `kvtier inspect`: what they find, that they change nothing, how they end."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import xxhash
from tier_files import FINGERPRINT, ID, TierFiles, flip, key_of, record_of

from kvtier.cli import main
from kvtier.daemon.state import open_directory
from kvtier.tiers.direct_file import DirectFile
from kvtier.tiers.sealed_file import write_sealed


@pytest.fixture
def files(tmp_path) -> TierFiles:
    return TierFiles(tmp_path)


@pytest.fixture
def fsck(files, capsys):
    """Runs `kvtier fsck --json` on the directory: (exit code, findings)."""

    def run(*words: str) -> tuple[int, dict]:
        before = everything(files.base)
        code = main(["fsck", str(files.directory), "--json", *words])
        assert everything(files.base) == before, "fsck changes nothing"
        said = capsys.readouterr()
        assert said.err == ""
        return code, json.loads(said.out)

    return run


def everything(base: Path) -> dict[str, tuple]:
    """Every file with its bytes and times, but for what taking the lock writes."""
    return {
        str(path): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in base.rglob("*")
        if path.name != "lock"
    }


# -- fsck -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--payloads",)])
def test_a_clean_directory(fsck, words):
    code, found = fsck(*words)
    assert code == 0
    assert found["clean"] is True
    assert found["damage"] == found["notes"] == []
    names = ("segments", "pages", "stale_records", "bad_headers", "corrupt_payloads", "unreadable")
    assert [[device[name] for name in names] for device in found["devices"]] == [
        [1, 3, 2, 0, 0, 0],  # pages 1, 2 (its newer record), 7; stale are the deleted 3, the old 2
        [2, 3, 0, 0, 0, 0],
    ]
    numbers = (1, 2, 7, 4, 5, 6)
    assert found["total"]["pages"] == 6
    assert found["total"]["payload_bytes"] == sum(5000 + number for number in numbers)
    (space,) = found["namespaces"]
    assert (space["fingerprint"], space["tenant"]) == (FINGERPRINT.hex(), "acme")
    assert (space["model"], space["generation"], space["pages"]) == ("maker/model", 1, 6)
    assert [(file["state"], file["number"]) for file in found["checkpoints"]] == [
        ("good", 2),
        ("good", 1),
    ]
    assert [journal["frames"] for journal in found["journals"]] == [0, 3]


def test_the_words_of_it(files, capsys):
    assert main(["fsck", str(files.directory)]) == 0
    said = capsys.readouterr().out
    assert "total   3         6" in said
    assert "checkpoint: good, number 2" in said
    assert "journal-0000000002: 3 frames, 0 damaged, 0 torn bytes" in said
    looked = [f"looked at: {files.base / f'device{n}'} (device {n})\n" for n in range(2)]
    assert said.endswith("".join(looked) + f"{files.directory}: clean\n")
    flip(files.segment(0), files.offset(0))
    assert main(["fsck", str(files.directory)]) == 1
    said = capsys.readouterr().out
    assert f"damage: {files.base / 'device0'}: segment 0: slot 0 has a bad header" in said
    assert said.endswith(f"{files.directory}: damage found\n")


@pytest.mark.parametrize(("device", "place"), [(0, 0), (1, 2)], ids=["marked", "as listed"])
@pytest.mark.parametrize("at", [0, 9, 60, 4090])
def test_a_bad_header_is_counted_once(files, fsck, device, place, at):
    flip(files.segment(device), files.offset(place) + at)
    code, found = fsck()
    assert code == 1
    assert [one["bad_headers"] for one in found["devices"]] == [1 - device, device]
    assert found["total"]["pages"] == 5
    (words,) = found["damage"]
    assert words.endswith(f"segment 0: slot {files.slot(device, place)} has a bad header")


def test_a_corrupt_payload_is_found_when_asked(files, fsck):
    flip(files.segment(1), files.offset(1) + 4096 + 3000)
    assert fsck()[0] == 0
    code, found = fsck("--payloads")
    assert code == 1
    assert [one["corrupt_payloads"] for one in found["devices"]] == [0, 1]
    assert found["total"]["pages"] == found["namespaces"][0]["pages"] == 5
    assert key_of(5).hex() in found["damage"][0]


def test_a_record_that_is_not_there(files, fsck):
    """Listed, in a segment that a start takes as it is: the header of another page, or none."""
    with files.segment(1).open("r+b") as file:
        file.seek(files.offset(0))
        file.write(bytes(4096))
        file.seek(files.offset(1))
        file.write(record_of(77, files.slot(1, 1))[0])
    code, found = fsck()
    assert code == 1
    assert (found["total"]["bad_headers"], found["total"]["pages"]) == (2, 4)


def test_damaged_journals_and_checkpoints(files, fsck):
    flip(files.journal, 64 + 34)
    with files.journal.open("ab") as file:
        file.write(b"half an entry")
    flip(files.directory / "checkpoint.old", 200)
    code, found = fsck()
    assert code == 1
    assert found["journals"][1] == {
        "file": "journal-0000000002",
        "frames": 2,
        "bad_frames": 1,
        "torn_bytes": 13,
    }
    assert found["damage"] == [
        "checkpoint.old: the sum of its body does not match",
        "journal-0000000002: 1 damaged frames",
        "journal-0000000002: a torn tail of 13 bytes",
    ]


def test_a_directory_whose_pages_would_not_come_back(files, fsck):
    files.journal.unlink()
    code, found = fsck()
    assert code == 1
    assert found["damage"] == ["no page would come back: journal 2 is missing"]
    assert found["total"]["pages"] == 0


def test_a_checkpoint_that_was_being_replaced_is_no_damage(files, fsck):
    (files.directory / "checkpoint").unlink()
    code, found = fsck()
    assert code == 0
    assert found["notes"] == ["a checkpoint was being replaced; the one before it is used"]
    assert found["total"]["pages"] == 6


def test_files_that_are_not_what_they_should_be(files, fsck):
    shutil.copy(files.segment(0), files.segment(0, 5))
    files.segment(0, 6).write_bytes(b"short")
    flip(files.segment(1, 1), 20)
    (files.base / "device0" / "holiday.jpg").touch()
    (files.base / "device1" / "segment-00000009.tmp").touch()
    code, found = fsck()
    assert code == 1
    first, second = found["devices"]
    assert first["rejected"] == [
        "segment-00000005: it is segment 0 of device 0",
        f"segment-00000006: it has 5 bytes, not {4096 + (64 << 10)}",
    ]
    assert first["foreign"] == ["holiday.jpg"]
    assert "segment-00000001: the checksum of its header" in second["rejected"][0]
    assert [words.split(": ")[1] for words in found["notes"]] == [
        "holiday.jpg (foreign)",
        "segment-00000009.tmp (left of a write)",
    ]
    assert found["total"]["pages"] == 6
    (files.base / "device1" / "segment-00000009.tmp").unlink()


@pytest.mark.parametrize("how", ["gone", "emptied", "of others", "swapped"])
def test_a_device_that_cannot_be_used(files, fsck, how):
    path = files.base / "device1"
    if how == "gone":
        shutil.rmtree(path)
    elif how == "emptied":
        shutil.rmtree(path)
        path.mkdir(mode=0o700)
    elif how == "of others":
        other = TierFiles(files.base / "other").base
        shutil.copy(other / "device0" / "device", path / "device")
    else:
        path.rename(files.base / "spare")
        (files.base / "device0").rename(path)
        (files.base / "spare").rename(files.base / "device0")
    code, found = fsck()
    if how == "swapped":  # as a start does, by identity
        assert (code, found["damage"], found["total"]["pages"]) == (0, [], 6)
        assert found["devices"][0]["path"] == str(path)
        return
    assert code == (3 if how == "of others" else 1)
    assert found["devices"][1]["problem"]
    assert found["devices"][1]["pages"] == 0
    assert found["devices"][0]["pages"] == 3
    assert "3 pages lie in segments that are not there" in found["damage"]


def test_a_segment_that_cannot_be_read(files, fsck, monkeypatch):
    read_at = DirectFile.read_at

    def failing(file: DirectFile, offset: int, into) -> None:
        if file.path == files.segment(1) and offset >= 4096:
            raise OSError(errno.EIO, "Input/output error")
        read_at(file, offset, into)

    monkeypatch.setattr(DirectFile, "read_at", failing)
    code, found = fsck("--payloads")
    assert code == 1
    assert [(one["pages"], one["unreadable"]) for one in found["devices"]] == [(3, 0), (0, 1)]
    (words,) = found["damage"]
    assert "segment 0: nvme tier: read failed" in words
    assert "Input/output error (EIO)" in words


def test_a_living_daemon_is_named(files, capsys):
    with open_directory(files.directory):
        assert main(["fsck", str(files.directory)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"error: {files.directory} is in use by the daemon with pid {os.getpid()}" in said.err
    assert "remedy: " in said.err


def test_a_real_daemon_is_left_alone(kvtier, daemon):
    result = kvtier("fsck", str(daemon.directory))
    assert (result.returncode, result.stdout) == (2, "")
    assert f"pid {daemon.pid}" in result.stderr
    daemon.close()
    result = kvtier("fsck", str(daemon.directory))
    assert result.returncode == 0, result.stderr
    assert "note: there is no NVMe tier" in result.stdout


def test_what_is_no_daemon_directory(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "none"):
        assert main(["fsck", str(path)]) == 2
        said = capsys.readouterr().err.splitlines()
        assert said[0] == f"error: {path} is not a daemon directory: it has no file `format`"
        assert said[1].startswith("remedy: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["format", "generations", "namespaces", "geometry"])
def test_a_damaged_small_file_is_damage(files, capsys, name):
    flip(files.directory / name, 3)
    before = everything(files.base)
    assert main(["fsck", str(files.directory)]) == 3
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"error: {files.directory / name} is damaged")
    assert len(said) == 2
    assert everything(files.base) == before


def test_namespaces_that_make_no_sense_are_damage(files, capsys):
    write_sealed(files.directory / "namespaces", b"names", b"\x81\xa1x\x01")
    assert main(["fsck", str(files.directory)]) == 3
    assert "make no sense" in capsys.readouterr().err


def test_another_version_is_refused(files, capsys):
    path = files.directory / "checkpoint"
    blob = bytearray(path.read_bytes())
    blob[8] = 9
    blob[120:128] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(blob[:120])))
    path.write_bytes(blob)
    assert main(["fsck", str(files.directory)]) == 3
    said = capsys.readouterr().err
    assert "has version 9; this build reads version 1" in said
    assert "--discard-cache" in said


# -- inspect --------------------------------------------------------------------------------------


@pytest.fixture
def inspect(capsys):
    """Runs `kvtier inspect --json`: (exit code, contents)."""

    def run(path: Path) -> tuple[int, dict]:
        code = main(["inspect", str(path), "--json"])
        said = capsys.readouterr()
        assert said.err == ""
        return code, json.loads(said.out)

    return run


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("format", ("number", 2)),
        ("generations", ("number", 1000)),
        ("namespaces", ("of_kind", "names")),
        ("geometry", ("of_kind", "geom")),
    ],
)
def test_inspect_sealed_files(files, inspect, name, fact):
    code, found = inspect(files.directory / name)
    assert (code, found["kind"], found["problems"]) == (0, "sealed file", [])
    assert found["facts"][fact[0]] == fact[1]
    flip(files.directory / name, 50 if name in ("namespaces", "geometry") else 40)
    code, found = inspect(files.directory / name)
    assert code == 1
    assert "its checksum does not match" in found["problems"][0]


def test_inspect_a_checkpoint(files, inspect):
    code, found = inspect(files.directory / "checkpoint")
    assert (code, found["kind"]) == (0, "checkpoint")
    assert found["facts"]["number"] == 2
    assert found["facts"]["directory_id"] == ID.hex()
    assert [page["key"] for page in found["items"]] == [key_of(n).hex() for n in range(1, 7)]
    for at in (2, 300):
        flip(files.directory / "checkpoint", at)
        code, found = inspect(files.directory / "checkpoint")
        assert (code, found["kind"], len(found["problems"])) == (1, "checkpoint", 1)


def test_inspect_a_journal(files, inspect):
    code, found = inspect(files.journal)
    assert (code, found["kind"], found["facts"]["frames"]) == (0, "journal", 3)
    assert [item["entry"] for item in found["items"]] == ["MARK", "DELETE", "DROP"]
    assert found["items"][1]["keys"] == [key_of(3).hex()]
    flip(files.journal, 64 + 34)
    assert inspect(files.journal)[1]["problems"] == ["1 damaged frames"]
    flip(files.journal, 64 + 34)
    flip(files.journal, 5)
    code, found = inspect(files.journal)
    assert (code, found["problems"]) == (1, ["its head is damaged"])
    assert len(found["items"]) == 3, "the directory's id is in the file beside it"
    alone = shutil.copy(files.journal, files.base / "journal-0000000002")
    code, found = inspect(alone)
    assert (code, found["items"]) == (1, [])


def test_inspect_a_segment(files, inspect, capsys):
    code, found = inspect(files.segment(0))
    assert (code, found["kind"]) == (0, "segment")
    assert (found["facts"]["device"], found["facts"]["segment"]) == (0, 0)
    assert [(item["offset"], item["sequence"]) for item in found["items"]] == [
        (files.offset(place), sequence) for place, sequence in enumerate((1, 2, 3, 7, 8))
    ]
    assert main(["inspect", str(files.segment(0))]) == 0
    assert "\x1b" not in capsys.readouterr().out, "no client's bytes reach the terminal"
    flip(files.segment(0), files.offset(1) + 100)
    code, found = inspect(files.segment(0))
    assert (code, len(found["items"])) == (1, 4)
    assert found["problems"][0].startswith(f"offset {files.offset(1)}: header_sum is")
    flip(files.segment(0), 3)
    assert "it does not start as a segment does" in inspect(files.segment(0))[1]["problems"]


def test_inspect_a_record(tmp_path, inspect):
    path = tmp_path / "record"
    whole = b"".join(record_of(5, 17, session="s1"))
    path.write_bytes(whole)
    code, found = inspect(path)
    assert (code, found["kind"], found["problems"]) == (0, "record", [])
    assert (found["facts"]["slot"], found["facts"]["session"]) == (17, "s1")
    for at, words in ((100, "header_sum is"), (5000, "the payload fails its payload_sum")):
        flip(path, at)
        code, found = inspect(path)
        assert code == 1
        assert words in found["problems"][0]
        path.write_bytes(whole)
    path.write_bytes(whole[:8000])
    assert "cut off" in inspect(path)[1]["problems"][0]


def test_inspect_what_is_none_of_kvtier(tmp_path, capsys):
    (tmp_path / "text").write_text("hello world")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "fifo")
    for name in ("text", "empty", "fifo", "none", "."):
        assert main(["inspect", str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert [line.split(":")[0] for line in said.err.splitlines()] == ["error", "remedy"]
