"""The order of what the journal says, around checkpoints and deletes; files are in memory unless a
test is about them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from durability_rig import (
    DIRECTORY_ID,
    LARGE,
    NAME,
    NS,
    SMALL,
    MemoryFiles,
    begin_down,
    make_durability,
    make_store,
    put_down,
)

from kvtier.core.page import PutCode
from kvtier.daemon.durability import DirectoryFiles
from kvtier.errors import DirectoryError
from kvtier.tiers.nvme_frames import JOURNAL_HEAD_BYTES, encode_frame, encode_head, frame_seed
from kvtier.tiers.nvme_journal import Delete, Entry, Known, Mark, journal_paths, read_journal
from tests.faults.kinds_rig import key_of, rows


@pytest.mark.parametrize("when", ["the mark is written", "the old journal is closed"])
def test_the_mark_of_a_copy_in_flight_does_not_overtake_a_newer_one(when: str) -> None:
    """A restart scans a segment for records of the size that the last mark of it says."""

    async def run() -> None:
        store, files = make_store(), MemoryFiles()
        durability = make_durability(store, files)
        await durability.begin(1, has_base=False)
        source, target = begin_down(store, "in flight", SMALL)
        await durability.mark(0, SMALL)

        async def meanwhile() -> None:
            # Its write fails, and the segment, which is empty then, gets another class.
            target.abandon()
            source.release()
            other, made = begin_down(store, "other class", LARGE)
            await durability.mark(0, LARGE)
            assert made.seal() is PutCode.STORED
            other.release()

        if when == "the mark is written":
            files.while_written = meanwhile
        else:
            files.journals[-1].while_closed = meanwhile
        await durability.checkpoint()
        marks = [entry for entry in files.journals[-1].entries if isinstance(entry, Mark)]
        assert marks == [Mark(0, SMALL), Mark(0, LARGE)]
        assert durability.marked_slabs == {0: LARGE}
        assert files.snapshots[-1].in_flight == (target.ref.generation,)
        await durability.close()

    asyncio.run(run())


def test_a_mark_that_is_asked_for_during_a_checkpoint_is_in_the_new_journal() -> None:
    async def run() -> None:
        store, files = make_store(), MemoryFiles()
        durability = make_durability(store, files)
        await durability.begin(1, has_base=False)
        await durability.mark(0, SMALL)
        checkpoint = asyncio.create_task(durability.checkpoint())
        await asyncio.sleep(0)
        await durability.mark(0, SMALL)
        await checkpoint
        assert [journal.number for journal in files.journals] == [1, 2]
        is_marked = [journal.entries == [Mark(0, SMALL)] for journal in files.journals]
        assert is_marked == [True, bool(durability.marked_slabs)]
        await durability.close()

    asyncio.run(run())


@pytest.mark.parametrize("ending", ["its callers go", "it fails"])
def test_the_last_mark_of_a_segment_is_of_what_is_written_there(ending: str) -> None:
    """One of another size that is under way comes later than what was known before it."""

    async def run() -> None:
        store, files = make_store(), MemoryFiles()
        durability = make_durability(store, files)
        await durability.begin(1, has_base=False)
        journal = files.journals[-1]
        await durability.mark(0, LARGE)
        answered = asyncio.Event()

        async def meanwhile() -> None:
            await answered.wait()
            if ending == "it fails":
                raise DirectoryError("nobody knows what was written", remedy="none")

        # The segment has become empty and is bound anew, for a page that never gets there.
        journal.while_written = meanwhile
        other = asyncio.create_task(durability.mark(0, SMALL))
        await asyncio.sleep(0.01)
        if ending == "its callers go":
            other.cancel()
            again = asyncio.create_task(durability.mark(0, LARGE))
            await asyncio.sleep(0.01)
            answered.set()
        else:
            answered.set()
            with pytest.raises(DirectoryError):
                await other
            again = asyncio.create_task(durability.mark(0, LARGE))
        await again
        assert journal.entries == [Mark(0, LARGE), Mark(0, SMALL), Mark(0, LARGE)]
        assert durability.marked_slabs == {0: LARGE}
        await asyncio.wait([other])
        await durability.close()

    asyncio.run(run())


def test_a_delete_covers_what_was_begun_before_it_and_nothing_later() -> None:
    """However much later it is journalled, and whatever the store has handed out meanwhile."""

    async def run() -> None:
        store, files = make_store(), MemoryFiles()
        durability = make_durability(store, files)
        await durability.begin(1, has_base=False)
        before = put_down(store, "page")
        store.delete(NS, 0, rows([key_of("page")]))
        doom = durability.doom(NS, 0, rows([key_of("page")]))
        moment = store.snapshots.last_generation
        after = put_down(store, "page")
        put_down(store, "another")
        await durability.journal([doom, None])
        (delete,) = files.journals[-1].entries
        assert isinstance(delete, Delete)
        assert (delete.fingerprint, delete.generation, delete.shard) == (*NAME, 0)
        assert delete.keys == key_of("page")
        assert before <= delete.bound == moment < after
        await durability.close()

    asyncio.run(run())


def test_nothing_of_an_ended_namespace_is_journalled() -> None:
    async def run() -> None:
        store, files = make_store(), MemoryFiles()
        durability = make_durability(store, files)
        await durability.begin(1, has_base=False)
        assert durability.doom(NS + 1, 0, rows([key_of("page")])) is None
        await durability.journal([None])
        assert files.journals[-1].entries == []
        await durability.close()

    asyncio.run(run())


@pytest.mark.parametrize("can_checkpoint", [True, False])
def test_keys_that_a_journal_has_no_room_for_become_a_checkpoint(can_checkpoint: bool) -> None:
    """It lists what is left, which says as much; without the tier there is no list to make."""

    async def run() -> None:
        store, files = make_store(), MemoryFiles()
        durability = make_durability(store, files, journal_bytes_max=64 << 10)
        await durability.begin(1, has_base=False)
        if not can_checkpoint:
            await durability.close()
            durability = make_durability(store, files, journal_bytes_max=0)
            await durability.begin(2, has_base=True, can_checkpoint=False)
        kept = put_down(store, "kept")
        put_down(store, "page")
        keys = rows([key_of(n) for n in range(3000)] + [key_of("page")])
        store.delete(NS, 0, keys)
        await durability.journal([durability.doom(NS, 0, keys)])
        deletes = [e for journal in files.journals for e in journal.entries]
        if can_checkpoint:
            assert deletes == []
            assert files.snapshots[-1].pages.generation.tolist() == [kept]
            assert max(journal.size_bytes for journal in files.journals) < 4096
        else:
            assert [len(delete.keys) // 32 for delete in deletes] == [3001]
            assert len(files.snapshots) == 1
        await durability.close()

    asyncio.run(run())


@pytest.mark.parametrize("what", ["", "a head", "a half", "all"])
def test_a_leftover_of_the_next_journal_does_not_block_checkpoints(
    tmp_path: Path, what: str
) -> None:
    """A `create` that fails half-way, and cannot take it back, leaves a journal without entries."""

    async def run() -> None:
        durability = make_durability(make_store(), DirectoryFiles(tmp_path, DIRECTORY_ID))
        await durability.begin(1, has_base=False)
        seed = frame_seed(DIRECTORY_ID, 2)
        opening = encode_head(DIRECTORY_ID, 2) + encode_frame([Known(1)], frame=0, seed=seed)
        left = opening[: {"": 0, "a head": JOURNAL_HEAD_BYTES, "a half": -32, "all": None}[what]]
        (tmp_path / "journal-0000000002").write_bytes(left)
        await durability.checkpoint()
        await durability.mark(0, SMALL)
        await durability.checkpoint()
        await durability.close()

    asyncio.run(run())
    journals = journal_paths(tmp_path)
    assert list(journals) == [2, 3], "what the checkpoint before the last one goes on with"
    assert happened(journals[2]) == [Mark(0, SMALL)]


def happened(path: Path) -> list[Entry]:
    """What a journal says beside its opening."""
    entries = read_journal(path, DIRECTORY_ID).entries
    assert isinstance(entries[0], Known)
    return list(entries[1:])


def test_a_journal_with_entries_is_never_replaced(tmp_path: Path) -> None:
    async def run() -> None:
        durability = make_durability(make_store(), DirectoryFiles(tmp_path, DIRECTORY_ID))
        await durability.begin(1, has_base=False)
        await durability.mark(0, SMALL)
        first = journal_paths(tmp_path)[1]
        second = first.with_name("journal-0000000002")
        second.write_bytes(first.read_bytes())
        with pytest.raises(DirectoryError, match="journal-0000000002"):
            await durability.checkpoint()
        assert second.read_bytes() == first.read_bytes()
        # What goes on is the journal that was there: nothing that is said from now on is lost.
        await durability.mark(0, LARGE)
        await durability.close()
        assert happened(first) == [Mark(0, SMALL), Mark(0, LARGE)]

    asyncio.run(run())


def test_a_delete_is_journalled_while_pages_wait_for_their_device() -> None:
    """A checkpoint in its place says nothing of pages that the store has not."""

    async def run() -> None:
        store, files = make_store(), MemoryFiles()
        durability = make_durability(store, files, journal_bytes_max=64 << 10)
        await durability.begin(1, has_base=False)
        durability.wait_for({3: 10})
        keys = rows([key_of(n) for n in range(3000)])
        await durability.journal([durability.doom(NS, 0, keys)])
        entries = [e for journal in files.journals for e in journal.entries]
        assert [len(e.keys) // 32 for e in entries if isinstance(e, Delete)] == [3000]
        await durability.close()

    asyncio.run(run())


def test_waiting_for_a_device_takes_so_much_room_and_ends() -> None:
    """Every checkpoint says that it lacks the device, until the journals that are kept for it would
    be more than the plan of the tier leaves room for."""

    async def run() -> None:
        store, files = make_store(), MemoryFiles()
        durability = make_durability(store, files, journal_bytes_max=8 * 4096)
        await durability.begin(1, has_base=False)
        durability.wait_for({3: 10})
        while durability.waits:
            put_down(store, len(files.snapshots))
            await durability.forget([1])
            await durability.checkpoint()
            assert len(files.snapshots) < 40
        assert durability.given_up == {3: 10}
        waits = [snapshot.waits for snapshot in files.snapshots[1:]]
        # Two without it: then none of the files that were kept for it is needed any more.
        assert waits == [{3: 10}] * 16 + [{}] * 2
        await durability.close()

    asyncio.run(run())
