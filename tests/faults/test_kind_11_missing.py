"""Kind 11, RESTART after files of the NVMe tier were taken away or cut short: what is missing is
named by log, status and fsck, and nothing that was deleted is served because of it.
"""

from __future__ import annotations

import os
import shutil

import pytest
from damage_rig import (
    COUNT,
    HIT,
    MISS,
    PAGES,
    SETTINGS,
    check_served,
    expected,
    frame_offsets,
    killed_daemon,
    newest_journal,
    opened,
)
from fault_rig import Saved, flip_bit, records, recovered, warnings_of

from kvtier.cli import main
from kvtier.cli.directory_check import check_directory


@pytest.fixture
def daemon(make_daemon, connect):
    return killed_daemon(make_daemon, connect)


# -- the journal ----------------------------------------------------------------------------------


@pytest.mark.parametrize("left_bytes", [0, 64])
def test_a_journal_cut_to_its_head_or_less_is_named(daemon, connect, left_bytes):
    journal = newest_journal(daemon)
    os.truncate(journal, left_bytes)
    findings = check_directory(daemon.directory, payloads=False)
    assert any(f"{journal.name} was cut short" in what for what in findings.damage)
    daemon.start()
    with connect(daemon) as kv:
        assert f"{journal.name} was cut short or damaged at its end: " in warnings_of(kv)


def test_a_damaged_last_entry_is_no_torn_tail(daemon, connect):
    journal = newest_journal(daemon)
    flip_bit(journal, frame_offsets(journal)[-1] + 34, 3)
    daemon.start()
    said = check_served(connect, daemon, [HIT] * COUNT)
    assert f"{journal.name} was cut short or damaged at its end: " in said


def test_an_entry_that_nobody_was_told_of_is_no_damage(daemon):
    journal = newest_journal(daemon)
    with journal.open("ab") as file:
        file.write(journal.read_bytes()[64:100])
    findings = check_directory(daemon.directory, payloads=False)
    assert findings.damage == []
    assert f"{journal.name}: a torn tail of 36 bytes" in findings.notes


@pytest.mark.parametrize("between", ["with the tier", "without the tier"])
def test_the_newest_journal_that_is_missing(daemon, connect, make_daemon, between):
    """Nothing comes after it that would show the gap; what it deleted must not be back."""
    daemon.start()
    kv, ns = opened(connect, daemon)
    ns.delete(PAGES.keys([1]))
    kv.close()
    daemon.kill()
    newest = newest_journal(daemon)
    assert newest.name == "journal-0000000002"
    newest.unlink()
    if between == "without the tier":
        without = make_daemon(*SETTINGS, "nvme.paths=").start()
        without.kill()
    daemon.start()
    said = check_served(connect, daemon, [MISS] * COUNT)
    assert "journal 2 is missing" in said
    assert "no page of earlier boots is trusted" in said


def test_a_damaged_note_of_lengths_is_named(daemon, connect, capsys):
    path = daemon.directory / "journals"
    assert main(["inspect", str(path)]) == 0
    size = newest_journal(daemon).stat().st_size
    assert f"journal=1  bytes={size}" in capsys.readouterr().out
    flip_bit(daemon.directory / "journals", 40, 1)
    assert main(["inspect", str(path)]) == 1
    daemon.start()
    said = check_served(connect, daemon, expected())
    assert "journals: its checksum does not match: whether a journal was cut short" in said


# -- segments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_checkpoint", [False, True])
def test_a_segment_that_is_not_there_is_named(daemon, connect, is_in_checkpoint):
    """Also the first one, and one that only the journal or only the checkpoint knows."""
    if is_in_checkpoint:
        daemon.start()
        assert daemon.stop() == 0
    nv = daemon.base / "nv"
    for name in ("segment-00000000", "segment-00000001"):
        saved = Saved(daemon)
        lost = {record.header.key for record in records(nv) if record.path.name == name}
        lost_numbers = {n for n in range(COUNT) if PAGES.key(n) in lost}
        (nv / name).unlink()
        said = f"{name} of device 0 is not there any more: its pages are misses"
        assert said in "\n".join(check_directory(daemon.directory, payloads=True).damage)
        daemon.start()
        assert recovered(daemon)["segments_gone"] == 1
        kv, ns = opened(connect, daemon)
        assert f"nvme: {said}" in warnings_of(kv)
        assert said in daemon.log
        assert PAGES.get(ns, range(COUNT)) == expected(lost_numbers)
        kv.close()
        daemon.kill()
        saved.put_back()
        for copy in (daemon.directory, nv):
            shutil.rmtree(copy.with_name(f"{copy.name}.saved"))


def test_a_cap_that_was_lowered_names_no_segment(daemon, connect, make_daemon):
    daemon.start()
    kv, ns = opened(connect, daemon)
    PAGES.put(ns, range(1000, 1400))
    kv.close()
    daemon.kill()
    before = len(list((daemon.base / "nv").glob("segment-*")))
    lower = make_daemon("nvme.bytes=4MiB", "nvme.checkpoint_s=3600").start()
    assert len(list((lower.base / "nv").glob("segment-*"))) < before
    with connect(lower) as kv:
        assert warnings_of(kv) == ""
    lower.kill()
    lower.start()
    with connect(lower) as kv:
        assert warnings_of(kv) == ""


def test_stray_names_are_passed_over_and_stay(daemon, connect):
    """Whatever looks like a file of ours, and cannot be one."""
    nv, state = daemon.base / "nv", daemon.directory
    strays = [
        nv / "segment-99999999",
        nv / "segment-0000000x",
        nv / "segment-000000000",
        nv / "segment-1",
        state / "journal-x",
        state / "journal-3",
        state / "checkpoint.new",
    ]
    for path in strays:
        path.touch()
    assert not any("Traceback" in what for what in check_directory(state, payloads=False).damage)
    daemon.start()
    said = check_served(connect, daemon, expected())
    assert "segment-99999999: there is no segment of such a number" in said
    assert all(path.exists() for path in strays)
    assert "Traceback" not in daemon.log


def test_a_stray_journal_of_the_highest_number_costs_one_start(daemon, connect):
    """Which pages are deleted is not known then; the next start knows again."""
    (daemon.directory / "journal-9999999999").touch()
    daemon.start()
    said = check_served(connect, daemon, [MISS] * COUNT)
    assert "journal 2 is missing (journal 9999999999 is there)" in said
