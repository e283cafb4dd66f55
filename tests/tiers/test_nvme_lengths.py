"""The bytes of `journals`: golden, damaged, of another directory, and more journals than it has
room for.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kvtier.tiers.nvme_lengths import LENGTHS, LengthNote, parse_lengths, read_lengths

ID = bytes(range(16))
GOLDEN = Path(__file__).parent.parent / "golden" / "journals_v1.hex"
LENGTHS_OF = {3: 64, 7: 4096}


def written(directory: Path, lengths: dict[int, int] = LENGTHS_OF) -> bytes:
    note = LengthNote(directory, ID)
    for number, nbytes in lengths.items():
        note.begin(number, 32)
        note.note(number, nbytes)
    return (directory / LENGTHS).read_bytes()


def test_golden_bytes(tmp_path):
    """These bytes lie on disks: a difference means a new version, not a new file."""
    golden = bytes.fromhex(GOLDEN.read_text())
    assert written(tmp_path) == golden
    assert parse_lengths(golden, ID).of == LENGTHS_OF
    assert parse_lengths(golden).newest == 7


def test_the_diagram_is_right(tmp_path):
    blob = written(tmp_path)
    assert len(blob) == 512
    assert struct.unpack_from("<8sII16s", blob) == (b"\x89KVTJLN\n", 1, 2, ID)
    assert struct.unpack_from("<4Q", blob, 32) == (3, 64, 7, 4096)
    assert not any(blob[64:504])


def test_a_changed_byte_says_nothing_and_why(tmp_path):
    blob = written(tmp_path)
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 1
        found = parse_lengths(bytes(damaged), ID)
        assert (found.of, bool(found.problem)) == ({}, True), at


@pytest.mark.parametrize("length", [0, 1, 511, 513])
def test_a_file_of_another_length_says_nothing_and_why(tmp_path, length):
    found = parse_lengths((written(tmp_path) + b"\0")[:length], ID)
    assert (found.of, bool(found.problem)) == ({}, True)


def test_one_of_another_directory_says_nothing_of_this_one(tmp_path):
    found = parse_lengths(written(tmp_path), bytes(16))
    assert (found.of, found.problem, found.newest) == ({}, "", 0)


def test_the_newest_journals_are_kept(tmp_path):
    written(tmp_path, {number: 1000 + number for number in range(1, 41)})
    assert read_lengths(tmp_path, ID).of == {number: 1000 + number for number in range(12, 41)}


def test_a_year_of_journals_takes_no_more_memory_than_the_file_has_room_for(tmp_path):
    """A checkpoint a minute makes half a million of them; and every delete writes the file."""
    note = LengthNote(tmp_path, ID)
    for number in range(1, 200):
        assert note.before(number) == tuple((n, 1000 + n) for n in range(1, number)[-2:])
        note.begin(number, 32)
        note.note(number, 1000 + number)
    assert len(note._of) == 29


def test_a_length_never_falls_and_higher_numbers_are_of_a_life_before(tmp_path):
    written(tmp_path, {5: 500, 9: 900})
    note = LengthNote(tmp_path, ID)
    note.begin(6, 32)
    note.note(6, 600)
    note.note(6, 64)
    assert read_lengths(tmp_path, ID).of == {5: 500, 6: 600}
    assert read_lengths(tmp_path, ID).lost_bytes(6, 100) == 500
