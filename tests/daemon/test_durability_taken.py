"""Files that are taken away while a checkpoint cannot be written, or is being written."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from durability_files import (
    begun,
    delete,
    names_in,
    recovered_from,
    refused,
    run,
)
from durability_rig import (
    SMALL,
    put_down,
)

from kvtier.daemon import directory_files
from kvtier.errors import DirectoryError
from kvtier.tiers import nvme_checkpoint
from kvtier.tiers.nvme_checkpoint import CHECKPOINT, CHECKPOINT_OLD
from kvtier.tiers.nvme_journal import journal_paths
from kvtier.tiers.nvme_old_files import remove_old


def test_what_was_taken_stays_amiss_until_it_has_been_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        store, durability = await begun(tmp_path)
        await durability.checkpoint()
        put_down(store, "page")
        for name in (CHECKPOINT, CHECKPOINT_OLD):
            (tmp_path / name).unlink()
        with refused(monkeypatch, nvme_checkpoint, "_write_synced"):
            for _ in range(3):
                with pytest.raises(DirectoryError, match="No space left"):
                    await durability.confirm()
        assert durability.problem
        await durability.confirm()
        assert not durability.problem
        assert names_in(recovered_from(tmp_path), ["page"]) == ["page"]
        await durability.close()

    run(work)


def test_what_was_taken_is_not_confirmed_because_a_checkpoint_is_being_written(
    tmp_path: Path,
) -> None:
    """It may never get there: a kill in the middle leaves what there is."""

    async def work() -> None:
        store, durability = await begun(tmp_path)
        await durability.checkpoint()
        put_down(store, "page")
        may_go_on, is_written = asyncio.Event(), asyncio.Event()
        write = durability._files.write_checkpoint

        async def slowly(*arguments: object) -> int:
            is_written.set()
            await may_go_on.wait()
            return await write(*arguments)

        durability._files.write_checkpoint = slowly
        checkpoint = asyncio.create_task(durability.checkpoint())
        await is_written.wait()
        for name in (CHECKPOINT, CHECKPOINT_OLD):
            (tmp_path / name).unlink()
        confirmed = asyncio.create_task(durability.confirm())
        await asyncio.wait([confirmed], timeout=0.3)
        assert not confirmed.done(), "no start would find anything"
        may_go_on.set()
        await confirmed
        await checkpoint
        assert names_in(recovered_from(tmp_path), ["page"]) == ["page"]
        await durability.close()

    run(work)


def test_what_was_taken_before_old_journals_go_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing what nobody needs is no reason to take what is there for all that should be."""

    def taken(directory: Path, keep_from: int) -> None:
        remove_old(directory, keep_from)
        (directory / CHECKPOINT).unlink()

    async def work() -> None:
        store, durability = await begun(tmp_path)
        put_down(store, "page")
        monkeypatch.setattr(directory_files, "remove_old", taken)
        await durability.checkpoint()
        monkeypatch.undo()
        await durability.confirm()
        assert (tmp_path / CHECKPOINT).exists()
        assert names_in(recovered_from(tmp_path), ["page"]) == ["page"]
        await durability.close()

    run(work)


def test_checkpoints_that_fail_leave_no_journal_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        store, durability = await begun(tmp_path)
        for name in ("deleted", "later", "kept"):
            put_down(store, name)
        await durability.checkpoint()
        before = list(journal_paths(tmp_path))
        with refused(monkeypatch, nvme_checkpoint, "_write_synced"):
            for _ in range(5):
                with pytest.raises(DirectoryError):
                    await durability.checkpoint()
        assert list(journal_paths(tmp_path)) == [*before, before[-1] + 1]
        await delete(store, durability, ["deleted"])
        await durability.checkpoint()
        await delete(store, durability, ["later"])
        pages = ["deleted", "later", "kept"]
        assert names_in(recovered_from(tmp_path), pages) == ["kept"]
        with refused(monkeypatch, nvme_checkpoint, "_write_synced"), pytest.raises(DirectoryError):
            await durability.checkpoint()
        await durability.mark(0, SMALL)
        await durability.checkpoint()
        assert durability.marked_slabs == {0: SMALL}, "a start will read the mark"
        assert recovered_from(tmp_path).report.segments_scanned == 1
        await durability.close()

    run(work)
