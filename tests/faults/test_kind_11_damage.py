"""Kind 11, RESTART over damaged files of state: what is lost is named, what is left is served, and
what cannot be read is refused, with nothing wiped.
"""

from __future__ import annotations

import os
import struct

import msgpack
import pytest
import xxhash
from damage_rig import (
    COUNT,
    HIT,
    MISS,
    PAGES,
    check_served,
    expected,
    frame_offsets,
    killed_daemon,
    newest_journal,
    opened,
)
from fault_rig import Saved, flip_bit, records, recovered, refused, warnings_of

from kvtier.cli import main
from kvtier.packing.checksum import header_sum
from kvtier.tiers.nvme_journal import Delete, Mark, read_journal
from kvtier.tiers.sealed_file import read_sealed, write_sealed


@pytest.fixture
def daemon(make_daemon, connect):
    return killed_daemon(make_daemon, connect)


def marked(path, daemon) -> dict[int, int]:
    entries = read_journal(path).entries
    return {entry.slab: entry.record_bytes for entry in entries if isinstance(entry, Mark)}


# -- the journal -----------------------------------------------------------------------------------


def test_a_torn_tail_is_dropped(daemon, connect):
    journal = newest_journal(daemon)
    (first, *_) = frame_offsets(journal)
    with journal.open("ab") as file:
        file.write(journal.read_bytes()[first : first + 40])
    daemon.start()
    assert (recovered(daemon)["torn_bytes"], recovered(daemon)["bad_frames"]) == (40, 0)
    assert check_served(connect, daemon, expected()) == ""


@pytest.mark.parametrize("left_bytes", [0, 10, 63])
def test_a_journal_cut_short_loses_its_last_frame_alone(daemon, connect, left_bytes):
    """More than a kill can do: what was synced is gone."""
    journal = newest_journal(daemon)
    assert isinstance(read_journal(journal).entries[-1], Delete)
    frame_bytes = journal.stat().st_size - frame_offsets(journal)[-1]
    os.truncate(journal, frame_offsets(journal)[-1] + left_bytes)
    daemon.start()
    assert recovered(daemon)["torn_bytes"] == left_bytes
    assert recovered(daemon)["cut_bytes"] == frame_bytes
    said = check_served(connect, daemon, [HIT] * COUNT)
    named = f"{journal.name} was cut short or damaged at its end: {frame_bytes} bytes of entries"
    assert named in said
    assert f"{named} that were acknowledged are gone" in daemon.log


def test_a_bad_frame_in_the_middle_costs_what_it_said(daemon, connect):
    journal = newest_journal(daemon)
    before = marked(journal, daemon)
    flip_bit(journal, frame_offsets(journal)[1] + 34, 3)
    (lost_slab,) = before.keys() - marked(journal, daemon).keys()
    lost = {
        record.header.key
        for record in records(daemon.base / "nv")
        if record.path.name == f"segment-{lost_slab:08d}"
    }
    lost_numbers = {n for n in range(COUNT) if PAGES.key(n) in lost}
    assert lost_numbers
    daemon.start()
    assert recovered(daemon)["bad_frames"] == 1
    warnings = check_served(connect, daemon, expected(lost_numbers), unsure=True)
    assert "1 damaged entries of the journal were left out" in warnings


def test_a_journal_that_is_missing(daemon, connect):
    newest_journal(daemon).unlink()
    daemon.start()
    said = check_served(connect, daemon, [MISS] * COUNT)
    assert "journal 1 is missing: no page of earlier boots is trusted" in said


# -- the checkpoints -------------------------------------------------------------------------------


@pytest.fixture
def two_checkpoints(daemon, connect):
    """Two checkpoints and a journal more, each of which knows of pages that the others do not."""
    for at in (COUNT, COUNT + 20):
        daemon.start()
        kv, ns = opened(connect, daemon)
        PAGES.put(ns, range(at, at + 20))
        ns.delete(PAGES.keys(range(at, at + 20, 10)))
        kv.close()
        assert daemon.stop() == 0
    daemon.start()
    kv, ns = opened(connect, daemon)
    PAGES.put(ns, range(COUNT + 40, COUNT + 60))
    ns.delete(PAGES.keys(range(COUNT + 40, COUNT + 60, 10)))
    kv.close()
    daemon.kill()
    return daemon


def all_found(connect, daemon) -> str:
    kv, ns = opened(connect, daemon)
    codes = PAGES.get(ns, range(COUNT + 60))
    assert codes == [MISS if n % 10 == 0 else HIT for n in range(COUNT + 60)]
    return warnings_of(kv)


def test_the_checkpoint_before_the_newest_is_enough(two_checkpoints, connect):
    daemon, saved = two_checkpoints, Saved(two_checkpoints)
    path = daemon.directory / "checkpoint"
    size = path.stat().st_size
    for damage in ("missing", "empty", "cut", "head", "body", "last byte"):
        match damage:
            case "missing":
                path.unlink()
            case "empty" | "cut":
                os.truncate(path, 0 if damage == "empty" else size // 2)
            case _:
                flip_bit(path, {"head": 33, "body": size // 2, "last byte": size - 1}[damage], 5)
        daemon.start()
        warnings = all_found(connect, daemon)
        assert "the checkpoint before the newest was used" in warnings
        assert ("nvme: checkpoint: " in warnings) == (damage != "missing")
        if damage == "last byte":
            break
        daemon.kill()
        saved.put_back()
    # The next checkpoint must not take the damaged one for the one to fall back to.
    assert daemon.stop() == 0
    flip_bit(path, 40, 1)
    daemon.start()
    all_found(connect, daemon)


def test_both_checkpoints_damaged(two_checkpoints, connect):
    daemon = two_checkpoints
    for name in ("checkpoint", "checkpoint.old"):
        flip_bit(daemon.directory / name, 200, 5)
    daemon.start()
    said = check_served(connect, daemon, [MISS] * COUNT)
    assert "there is no whole checkpoint: no page of earlier boots is trusted" in said
    assert "nvme: checkpoint: the sum of its body does not match" in said
    assert "nvme: checkpoint.old: the sum of its body does not match" in said


def test_a_file_that_cannot_be_read_is_not_given_up(two_checkpoints, connect):
    """A directory in its place is an error of the system, as a bad block is."""
    daemon = two_checkpoints
    for name in ("checkpoint", newest_journal(daemon).name, "geometry"):
        path, aside = daemon.directory / name, daemon.base / "aside"
        path.rename(aside)
        path.mkdir()
        before = sorted(item.name for item in daemon.directory.iterdir())
        said = refused(daemon)
        assert f"{path} cannot be read: Is a directory" in said
        assert sorted(item.name for item in daemon.directory.iterdir()) == before
        path.rmdir()
        aside.rename(path)
    daemon.start()
    all_found(connect, daemon)


# -- versions to come ------------------------------------------------------------------------------


def with_version(path, version: int) -> None:
    """As a later build may write it: a sound head of another version."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, version)
    head_bytes = struct.unpack_from("<I", data, 12)[0]
    struct.pack_into(
        "<Q", data, head_bytes - 8, xxhash.xxh3_64_intdigest(bytes(data[: head_bytes - 8]))
    )
    path.write_bytes(data)


def later(daemon, name: str) -> None:
    """Makes one file of the daemon that of a version to come."""
    state = daemon.directory
    if name == "format":
        write_sealed(state / "format", b"format", (9).to_bytes(4, "little"))
    elif name in ("geometry", "device"):
        path, kind = (
            (state / "geometry", b"geom")
            if name == "geometry"
            else (daemon.base / "nv" / "device", b"device")
        )
        document = msgpack.unpackb(read_sealed(path, kind))
        write_sealed(path, kind, msgpack.packb(document | {"version": 9}))
    elif name == "checkpoint":
        with_version(state / "checkpoint", 9)
    elif name == "journal":
        with_version(newest_journal(daemon), 9)


def test_a_version_to_come_is_refused_and_can_be_given_up(daemon, connect):
    places = (daemon.directory, daemon.base / "nv")
    for name in ("format", "geometry", "device", "checkpoint", "journal"):
        kept = {
            path: path.read_bytes()
            for place in places
            for path in place.iterdir()
            if not path.name.startswith(("segment", "lock"))
        }
        later(daemon, name)
        said = refused(daemon)
        assert "version 9" in said, name
        assert "--discard-cache" in said, name
        for path, data in kept.items():
            path.write_bytes(data)
    daemon.start()
    assert check_served(connect, daemon, expected()) == ""
    daemon.kill()
    for name in ("format", "geometry", "device", "checkpoint", "journal"):
        later(daemon, name)
        daemon.start("--discard-cache")
        kv, ns = opened(connect, daemon)
        assert PAGES.get(ns, range(30)) == [MISS] * 30
        PAGES.put(ns, range(30))
        kv.close()
        daemon.kill()
    daemon.start()
    _, ns = opened(connect, daemon)
    assert PAGES.get(ns, range(30)) == [HIT] * 30


def test_a_segment_of_a_version_to_come_is_not_read(daemon, connect):
    path = min((daemon.base / "nv").glob("segment-*"))
    block = bytearray(path.read_bytes()[:4096])
    struct.pack_into("<I", block, 8, 9)
    struct.pack_into("<Q", block, 4088, header_sum(memoryview(block)[:4088]))
    lost = {record.header.key for record in records(daemon.base / "nv") if record.path == path}
    with path.open("r+b") as file:
        file.write(block)
    daemon.start()
    kv, ns = opened(connect, daemon)
    assert f"{path.name}: it has version 9" in warnings_of(kv)
    lost_numbers = {n for n in range(COUNT) if PAGES.key(n) in lost}
    assert PAGES.get(ns, range(COUNT)) == expected(lost_numbers)
    kv.close()
    daemon.kill()
    daemon.start("--discard-cache")
    kv, ns = opened(connect, daemon)
    assert warnings_of(kv) == ""
    PAGES.put(ns, range(10))


@pytest.mark.parametrize("name", ["format", "generations", "namespaces", "geometry", "device"])
def test_damage_that_stops_a_start_names_the_way_out(daemon, connect, capsys, name):
    """Which works; and fsck does not call it damage that a start copes with."""
    path = (daemon.base / "nv" if name == "device" else daemon.directory) / name
    whole = path.read_bytes()
    for what in ("bit", "cut", "fifo"):
        path.unlink()
        if what == "fifo":
            os.mkfifo(path)
        else:
            path.write_bytes(whole[:10])
        if what == "bit":
            path.write_bytes(whole)
            flip_bit(path, len(whole) - 3, 1)
        said = refused(daemon)
        assert str(path) in said
        assert ("is not a regular file" if what == "fifo" else "is damaged") in said
        assert ("--discard-cache" in said) or what == "fifo"
        code = main(["fsck", str(daemon.directory)])
        told = "".join(capsys.readouterr())
        assert str(path) in told or what == "fifo"
        assert code == 3, told
    path.unlink()
    path.write_bytes(whole[:10])
    daemon.start("--discard-cache")
    kv, ns = opened(connect, daemon)
    assert PAGES.get(ns, range(COUNT)) == [MISS] * COUNT
    PAGES.put(ns, range(20))
    kv.close()
    daemon.kill()
    daemon.start()
    _, ns = opened(connect, daemon)
    assert PAGES.get(ns, range(20)) == [HIT] * 20
