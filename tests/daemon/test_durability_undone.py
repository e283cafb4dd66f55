"""A journal whose creation was given up half-way was never there: the entries of the one before it
count, and a start does not miss it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from durability_files import begun, delete, names_in, recovered_from, run
from durability_rig import DIRECTORY_ID, put_down

from kvtier.daemon.durability import Durability
from kvtier.errors import DirectoryError
from kvtier.tiers import nvme_journal, nvme_lengths
from kvtier.tiers.nvme_journal import journal_paths
from kvtier.tiers.nvme_lengths import read_lengths
from kvtier.tiers.nvme_recovery import Base

PAGES = ["deleted", "kept"]


async def cancelled(durability: Durability, patch: pytest.MonkeyPatch) -> None:
    """As by the deadline of the call that it is made in, or by the end of the daemon."""
    original = nvme_journal.sync_directory
    reached, go_on = threading.Event(), threading.Event()

    def slow(directory: Path) -> None:
        reached.set()
        assert go_on.wait(10)
        original(directory)

    patch.setattr(nvme_journal, "sync_directory", slow)
    call = asyncio.create_task(durability.checkpoint())
    assert await asyncio.to_thread(reached.wait, 10)
    call.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call


async def without_descriptors(durability: Durability, patch: pytest.MonkeyPatch) -> None:
    """At the last step of its creation, and of taking it back."""
    original, opened = nvme_lengths.open_plain, []

    def refuse(*arguments: object) -> int:
        opened.append(arguments)
        if len(opened) == 1:  # before it is created
            return original(*arguments)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    patch.setattr(nvme_lengths, "open_plain", refuse)
    with pytest.raises(DirectoryError):
        await durability.checkpoint()
    assert len(opened) == 3


@pytest.mark.parametrize("way", [cancelled, without_descriptors])
@pytest.mark.parametrize("then", ["killed", "goes on"])
def test_nothing_is_lost_by_a_journal_that_was_given_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: Callable[[Durability, pytest.MonkeyPatch], None],
    then: str,
) -> None:
    async def work() -> None:
        store, durability = await begun(tmp_path)
        for page in PAGES:
            put_down(store, page)
        await durability.checkpoint()
        before = set(journal_paths(tmp_path))
        with monkeypatch.context() as patch:
            await way(durability, patch)
        # The one before it goes on, and its length is noted with every entry.
        await delete(store, durability, ["deleted"])
        assert max(read_lengths(tmp_path, DIRECTORY_ID).of) == max(before)
        if then == "goes on":
            await durability.checkpoint()
        await durability.close()  # which writes nothing more

    run(work)
    recovered = recovered_from(tmp_path)
    assert recovered.report.base is Base.NEWEST
    assert names_in(recovered, PAGES) == ["kept"]
