"""The bytes of a journal: golden, and damaged. A damaged frame costs itself alone, a torn tail is
dropped and counted, and no bytes of a client are ever taken for a frame.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import xxhash

from kvtier.tiers.nvme_frames import JOURNAL_HEAD_BYTES, encode_frame, encode_head, frame_seed
from kvtier.tiers.nvme_journal import (
    Delete,
    Drop,
    Known,
    Mark,
    read_journal,
)

ID = bytes(range(16))
GOLDEN = Path(__file__).parent.parent / "golden"
ENTRIES_V1 = (
    Mark(5 << 20 | 7, 135168),
    Drop((1, 2**64 - 1)),
    Delete(bytes(range(32)), 3, 65535, bytes(range(64)), 2**40),
)
ENTRIES = (*ENTRIES_V1, Known(2**40, ((5, 4096), (6, 64))), Known(0))


def written(directory: Path, *batches, number: int = 7) -> Path:
    """A journal with a frame a batch, by the pure functions."""
    path = directory / f"journal-{number:010d}"
    seed = frame_seed(ID, number)
    frames = [encode_frame(batch, frame=at, seed=seed) for at, batch in enumerate(batches)]
    path.write_bytes(b"".join([encode_head(ID, number), *frames]))
    return path


def write_golden() -> None:
    """How the golden file was made; kept so that the next version can be made alike."""
    blob = encode_head(ID, 7) + encode_frame(ENTRIES, frame=0, seed=frame_seed(ID, 7))
    lines = [blob[at : at + 32].hex() for at in range(0, len(blob), 32)]
    (GOLDEN / "journal_v2.hex").write_text("\n".join(lines) + "\n")


# -- bytes ----------------------------------------------------------------------------------------


def test_golden_bytes(tmp_path):
    """These bytes lie on disks: a difference means a new JOURNAL_VERSION, not a new file."""
    golden = bytes.fromhex((GOLDEN / "journal_v2.hex").read_text())
    path = written(tmp_path, ENTRIES)
    assert path.read_bytes() == golden
    contents = read_journal(path, ID)
    assert contents.entries == ENTRIES
    assert (contents.number, contents.directory_id, contents.frames) == (7, ID, 1)


def test_a_journal_of_version_1_is_read(tmp_path):
    golden = bytes.fromhex((GOLDEN / "journal_v1.hex").read_text())
    path = tmp_path / "journal-0000000007"
    path.write_bytes(golden)
    assert read_journal(path, ID).entries == ENTRIES_V1


def test_version_1_has_no_entry_of_version_2(tmp_path):
    """Its sum is right, so a faulty writer made it."""
    golden = bytes.fromhex((GOLDEN / "journal_v1.hex").read_text())
    path = tmp_path / "journal-0000000007"
    frame = encode_frame([Known(1)], frame=1, seed=frame_seed(ID, 7))
    path.write_bytes(golden + frame)
    contents = read_journal(path, ID)
    assert (contents.entries, contents.bad_frames) == (ENTRIES_V1, 1)


def test_the_diagram_is_right():
    head = encode_head(ID, 7)
    assert head[:56] == b"\x89KVTJNL\n" + struct.pack("<II16sQ16x", 2, 64, ID, 7)
    assert head[56:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(head[:56]))
    seed = xxhash.xxh3_64_intdigest(ID + struct.pack("<Q", 7))
    frame = encode_frame([Mark(1, 8192)], frame=9, seed=frame_seed(ID, 7))
    content = bytes.fromhex("9193" + "01" + "01" + "cd2000")
    assert frame[:24] == b"\x89KVTFRM\n" + struct.pack("<I4xQ", len(content), 9)
    total = xxhash.xxh3_64_intdigest(frame[:24] + content, seed)
    assert frame[24:] == struct.pack("<Q", total) + content + bytes(64 - 32 - len(content))


@pytest.mark.parametrize("fields", [(bytes(31), bytes(32)), (bytes(32), bytes(33))])
def test_a_delete_of_a_wrong_length_is_none(fields):
    with pytest.raises(ValueError, match="bytes of ids"):
        Delete(fields[0], 1, 0, fields[1], 1)


# -- damage ---------------------------------------------------------------------------------------


def test_kind_17_torn_tail_at_every_byte(tmp_path):
    path = written(tmp_path, ENTRIES_V1[:1], ENTRIES_V1[1:2], ENTRIES_V1[2:])
    whole = path.read_bytes()
    ends = [64, 128, 192, len(whole)]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        contents = read_journal(path, ID)
        count = sum(cut >= end for end in ends[1:])
        assert contents.entries == ENTRIES_V1[:count], cut
        assert contents.torn_bytes == cut - max(end for end in [0, *ends] if end <= cut), cut
        assert contents.bad_frames == 0
        assert contents.number == 7


def test_kind_11_restart_a_damaged_frame_costs_itself_alone(tmp_path):
    batches = [[Drop((number,))] for number in range(5)]
    path = written(tmp_path, *batches)
    whole = path.read_bytes()
    rng = random.Random(2)
    for at in range(64, len(whole)):
        blob = bytearray(whole)
        blob[at] ^= 1 << rng.randrange(8)
        path.write_bytes(blob)
        hit = (at - 64) // 64
        contents = read_journal(path, ID)
        found = [entry.generations[0] for entry in contents.entries]
        if found == list(range(5)):
            assert whole[at] == 0, "only padding may change and be nobody's loss"
            continue
        assert found == [number for number in range(5) if number != hit], at
        lost = (contents.bad_frames, contents.torn_bytes)
        assert lost == ((1, 0) if hit < 4 else (0, 64)), at


def test_a_hole_of_several_frames_is_counted_by_their_numbers(tmp_path):
    path = written(tmp_path, *[[Drop((number,))] for number in range(6)])
    blob = bytearray(path.read_bytes())
    blob[128:300] = b"\xa5" * 172
    path.write_bytes(blob)
    contents = read_journal(path, ID)
    assert [entry.generations[0] for entry in contents.entries] == [0, 4, 5]
    assert (contents.frames, contents.bad_frames) == (3, 3)


def test_a_frame_that_is_there_twice_counts_once(tmp_path):
    path = written(tmp_path, ENTRIES[:1], ENTRIES[1:])
    blob = path.read_bytes()
    path.write_bytes(blob + blob[64:128])
    contents = read_journal(path, ID)
    assert contents.entries == ENTRIES
    assert (contents.frames, contents.bad_frames, contents.torn_bytes) == (2, 0, 64)


def test_a_damaged_head_costs_no_entry(tmp_path):
    path = written(tmp_path, ENTRIES)
    whole = path.read_bytes()
    for at in range(JOURNAL_HEAD_BYTES):
        blob = bytearray(whole)
        blob[at] ^= 0x10
        path.write_bytes(blob)
        contents = read_journal(path, ID)
        assert contents.entries == ENTRIES
        assert (contents.bad_frames, contents.is_head_damaged) == (1, True)


def test_bytes_of_clients_are_never_taken_for_a_frame(tmp_path):
    """A key that holds a frame, of another journal or without the seed, in a frame that is lost."""
    forged = [
        encode_frame([Drop((666,))], frame=1, seed=frame_seed(ID, 8)),
        encode_frame([Drop((666,))], frame=1, seed=0),
    ]
    for frame in forged:
        for shift in range(0, 64, 4):
            keys = bytes(shift) + frame + bytes(-(shift + len(frame)) % 32)
            path = written(tmp_path, [Delete(bytes(32), 1, 0, keys, 1)], [Drop((1,))])
            blob = bytearray(path.read_bytes())
            blob[70] ^= 1
            path.write_bytes(blob)
            contents = read_journal(path, ID)
            assert contents.entries == (Drop((1,)),)
            assert contents.bad_frames == 1


@pytest.mark.parametrize(
    "content",
    ["01", "9191", "919300cd2000", "9193ff01cd2000", "91920291a178", "c1", "9192029101c0"],
)
def test_a_sound_frame_of_nonsense_is_a_bad_one(tmp_path, content):
    path = written(tmp_path, ENTRIES[:1], [Mark(1, 8192)])
    blob = bytearray(path.read_bytes())
    body = bytes.fromhex(content)
    blob[128:192] = bytes(64)
    head = b"\x89KVTFRM\n" + struct.pack("<I4xQ", len(body), 1)
    total = xxhash.xxh3_64_intdigest(head + body, frame_seed(ID, 7))
    frame = head + struct.pack("<Q", total) + body
    blob[128 : 128 + len(frame)] = frame
    path.write_bytes(blob)
    contents = read_journal(path, ID)
    assert contents.entries == ENTRIES[:1]
    assert (contents.frames, contents.bad_frames) == (1, 1)
