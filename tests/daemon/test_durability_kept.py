"""What is kept of checkpoints and journals, and what a recovery makes of it when some of it is
damaged, or a device was away.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from durability_files import (
    ELSEWHERE,
    HERE,
    JOURNAL_BYTES,
    begun,
    damage,
    delete,
    journals_bytes,
    lose,
    names_in,
    on,
    recovered_from,
    refused,
    run,
)
from durability_rig import (
    DIRECTORY_ID,
    NAME,
    NS,
    SEGMENT,
    make_store,
    put_down,
)

from kvtier.errors import DirectoryError
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers import nvme_journal
from kvtier.tiers.nvme_checkpoint import CHECKPOINT, CHECKPOINT_OLD
from kvtier.tiers.nvme_frames import JOURNAL_HEAD_BYTES
from kvtier.tiers.nvme_journal import Drop, journal_paths, read_journal
from kvtier.tiers.nvme_recovery import Base, recover
from tests.faults.kinds_rig import key_of, rows

# -- deletes that no journal has room for ----------------------------------------------------------


@pytest.mark.parametrize("why", ["longer than any", "no room left", "refused"])
def test_a_delete_holds_when_the_checkpoint_that_says_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    async def work() -> None:
        store, durability = await begun(tmp_path)
        put_down(store, "deleted")
        put_down(store, "kept")
        await durability.checkpoint()
        if why == "longer than any":
            await delete(store, durability, ["deleted"], others=3000)
        elif why == "no room left":
            await delete(store, durability, [], others=1500)
            await delete(store, durability, ["deleted"], others=1000)
        else:
            with refused(monkeypatch, nvme_journal, "write_whole", times=1):
                await delete(store, durability, ["deleted"])
        assert durability.checkpoints > 2
        await durability.close()

    run(work)
    pages = ["deleted", "kept"]
    assert names_in(recovered_from(tmp_path), pages) == ["kept"]
    damage(tmp_path / CHECKPOINT)
    recovered = recovered_from(tmp_path)
    assert recovered.report.base is Base.OLD
    assert names_in(recovered, pages) == ["kept"]


def test_a_copy_that_could_not_be_journalled_as_gone_is_so_with_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a start that begins with an older one."""

    async def work() -> None:
        store, durability = await begun(tmp_path)
        gone = put_down(store, "gone")
        put_down(store, "kept")
        await durability.checkpoint()
        store.delete(NS, 0, rows([key_of("gone")]))  # out of sight; not journalled as a delete
        with refused(monkeypatch, nvme_journal, "write_whole"), pytest.raises(DirectoryError):
            await durability.forget([gone])
        await durability.checkpoint()
        assert Drop((gone,)) in read_journal(max(journal_paths(tmp_path).values())).entries
        await durability.close()

    run(work)
    damage(tmp_path / CHECKPOINT)
    assert names_in(recovered_from(tmp_path), ["gone", "kept"]) == ["kept"]


# -- a device that is away -------------------------------------------------------------------------


@pytest.mark.parametrize("hurt", ["", "cut", "damaged", "removed", "old removed", "old damaged"])
def test_what_was_deleted_while_its_device_was_away_does_not_come_back(
    tmp_path: Path, hurt: str
) -> None:
    """Where an entry of these journals is lost, the newest checkpoint knows better: what waited is
    given up, and named."""

    async def work() -> None:
        store, durability = await begun(tmp_path)
        put_down(store, "deleted")
        put_down(store, "kept")
        await durability.checkpoint()
        lose(store, durability)
        await delete(store, durability, ["deleted"])
        await durability.checkpoint()
        await durability.checkpoint()
        await durability.close()

    run(work)
    paths = journal_paths(tmp_path)
    assert list(paths) == [2, 3, 4]
    match hurt:
        case "cut":
            os.truncate(paths[2], JOURNAL_HEAD_BYTES)
        case "damaged":
            damage(paths[2])
        case "removed":
            paths[2].unlink()
        case "old removed":
            (tmp_path / CHECKPOINT_OLD).unlink()
        case "old damaged":
            damage(tmp_path / CHECKPOINT_OLD)
    pages = ["deleted", "kept"]
    away = recovered_from(tmp_path, present=[ELSEWHERE])
    assert (away.waits, names_in(away, pages)) == ({HERE: 2}, [])
    back = recovered_from(tmp_path, present=[HERE, ELSEWHERE])
    assert names_in(back, pages) == ([] if hurt else ["kept"])
    assert back.report.base is (Base.NEWEST if hurt else Base.AWAITED)
    lost = [text for text in back.report.warnings() if "about 2 pages of device 0 are lost" in text]
    assert len(lost) == bool(hurt)
    assert back.waits == {}


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_journal_that_was_cut_is_noticed_however_many_came_after_it(
    tmp_path: Path, is_cut: bool
) -> None:
    """More than the file `journals` has room for."""

    async def work() -> None:
        store, durability = await begun(tmp_path, journal_bytes_max=1 << 20)
        put_down(store, "deleted")
        put_down(store, "kept")
        await durability.checkpoint()
        lose(store, durability)
        await delete(store, durability, ["deleted"])
        for _ in range(40):
            await durability.checkpoint()
        await durability.close()

    run(work)
    paths = journal_paths(tmp_path)
    assert list(paths) == list(range(2, 43))
    if is_cut:
        os.truncate(paths[2], paths[2].stat().st_size - 64)
    back = recovered_from(tmp_path, present=[HERE, ELSEWHERE])
    assert names_in(back, ["deleted", "kept"]) == ([] if is_cut else ["kept"])
    lost = "about 2 pages of device 0 are lost: journal-0000000002 is damaged"
    assert (lost in back.report.warnings()) is is_cut


def test_what_only_a_file_that_was_taken_away_had_is_named_as_lost(tmp_path: Path) -> None:
    """A checkpoint that lacks the device has taken the place of the one that had its pages."""

    async def work() -> None:
        store, durability = await begun(tmp_path)
        put_down(store, "page")
        await durability.checkpoint()
        lose(store, durability)
        await durability.checkpoint()
        (tmp_path / CHECKPOINT_OLD).unlink()
        await durability.checkpoint()
        await durability.close()

    run(work)
    back = recovered_from(tmp_path, present=[HERE, ELSEWHERE])
    assert "about 1 pages of device 0 are lost: checkpoint.old lacks them" in back.report.warnings()
    assert back.waits == {}


def test_journals_that_are_kept_for_a_device_are_bounded_over_all_boots(tmp_path: Path) -> None:
    """By what the plan of the tier leaves for journals; then the pages are given up, at once and
    with every file that was kept for them."""

    async def boot(number: int) -> bool:
        store = make_store()
        durability = on(tmp_path, store)
        has_base = number > 0
        recovered = recovered_from(tmp_path, present=[HERE])
        durability.wait_for(recovered.waits)
        await durability.begin(recovered.next_number, has_base=has_base)
        if not has_base:
            durability.wait_for({ELSEWHERE: 10})
        await delete(store, durability, [], others=1500)
        assert journals_bytes(tmp_path) <= 3 * JOURNAL_BYTES + 4096
        await durability.checkpoint()
        assert journals_bytes(tmp_path) <= 3 * JOURNAL_BYTES + 4096
        await durability.close()
        return bool(durability.given_up)

    async def work() -> None:
        boots = [await boot(number) for number in range(6)]
        assert boots.count(True) == 1
        assert not any(boots[:2]), "there is room for some"
        assert len(journal_paths(tmp_path)) < 6

    run(work)


def test_pages_that_could_not_be_read_at_a_start_come_back_with_one_that_can(
    tmp_path: Path,
) -> None:
    """A passing error of the device: no checkpoint makes it last."""

    async def work() -> None:
        store, durability = await begun(tmp_path)
        put_down(store, "deleted")
        put_down(store, "kept")
        await durability.checkpoint()
        await durability.close()
        recovered = recover(
            tmp_path,
            directory_id=DIRECTORY_ID,
            tier=MemoryTier(16 * SEGMENT),
            slabs=[],
            unreadable=[0],
            segment_bytes=SEGMENT,
            generations=dict([NAME]),
            generation_floor=0,
            present=[HERE],
        )
        assert (len(recovered.pages), recovered.unread) == (0, {0})
        store = make_store(spent=1 << 20)
        durability = on(tmp_path, store)
        durability.wait_for(recovered.waits)
        await durability.begin(recovered.next_number, has_base=True)
        await delete(store, durability, ["deleted"])
        await durability.checkpoint()
        await durability.checkpoint()
        await durability.close()

    run(work)
    recovered = recovered_from(tmp_path, present=[HERE])
    assert names_in(recovered, ["deleted", "kept"]) == ["kept"]
    assert recovered.waits == {}
