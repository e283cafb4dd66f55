"""What boots without the tier write is bounded, whatever it is and however many boots there are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from durability_files import begun, journals_bytes, names_in, recovered_from, run
from durability_rig import DIRECTORY_ID, NAME, SEGMENT, make_store, put_down

from kvtier.daemon.durability import DirectoryFiles
from kvtier.daemon.nvme_absent import KeptDeletes
from kvtier.tiers.nvme_recovery import Base

KEPT_BYTES = 16 << 10
GIVEN_UP = "the pages on NVMe were given up"


async def with_a_page(directory: Path) -> None:
    store, durability = await begun(directory)
    put_down(store, "page")
    await durability.checkpoint()
    await durability.close()
    assert names_in(recovered_from(directory), ["page"]) == ["page"]


async def boot(directory: Path) -> KeptDeletes:
    """Without the tier."""
    durability = KeptDeletes(
        DirectoryFiles(directory, DIRECTORY_ID),
        make_store(),
        SimpleNamespace(name_of=lambda number: NAME),  # type: ignore[arg-type]
        segment_bytes=SEGMENT,
        kept_bytes_max=KEPT_BYTES,
    )
    number = recovered_from(directory).next_number
    await durability.begin(number, has_base=True, can_checkpoint=False)
    return durability


def check_given_up(directory: Path) -> None:
    assert journals_bytes(directory) == 0
    assert recovered_from(directory).report.base is Base.NONE


def test_bumps_without_the_tier_are_journalled_as_long_as_there_is_room(tmp_path: Path) -> None:
    async def work() -> None:
        await with_a_page(tmp_path)
        durability = await boot(tmp_path)
        for names in range(1, 1000):
            await durability.know(names)
            assert journals_bytes(tmp_path) <= KEPT_BYTES
            if durability.problem:
                break
        assert names > 50, "there is room for some"
        assert GIVEN_UP in durability.problem
        await durability.know(names + 1)
        await durability.journal([])
        await durability.close()

    run(work)
    check_given_up(tmp_path)


def test_many_boots_without_the_tier_leave_no_more_than_there_is_room_for(tmp_path: Path) -> None:
    async def work() -> None:
        await with_a_page(tmp_path)
        problems = []
        while not any(problems) and len(problems) < 20:
            durability = await boot(tmp_path)
            problems.append(durability.problem)
            bytes_now = journals_bytes(tmp_path)
            await durability.close()
            assert bytes_now <= KEPT_BYTES, problems
        assert len(problems) > 2, "some boots have room"
        assert GIVEN_UP in problems[-1]

    run(work)
    check_given_up(tmp_path)
