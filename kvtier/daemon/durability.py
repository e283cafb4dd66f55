"""What survives the process: the journal, the checkpoints, and the marks that tie them together.

    mark        a segment is journalled before its first record after a checkpoint, so that a
                restart knows where to look for what the checkpoint does not list
    forget      a record that must not come back is journalled before anybody is told that it is
                gone
    checkpoint  a new journal is begun in the same moment that the store is copied; then the copy
                is written; only then the journals before it go. While a device with pages is away,
                the last checkpoint that has them and all journals since stay. What no journal says
                is said by both checkpoints, for one of them may be damaged

Event loop's thread; what takes time is done on others, which ask `name_of` too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvtier.core.page import Tier
from kvtier.core.snapshots import TierImage
from kvtier.core.store import Store
from kvtier.daemon.directory_files import DirectoryFiles, JournalFile, StateFiles
from kvtier.daemon.nvme_image import NameOf, snapshot_of
from kvtier.errors import DirectoryError
from kvtier.tiers.crash_points import crash_point
from kvtier.tiers.nvme_journal import Delete, Drop, Entry, Known, Mark
from kvtier.tiers.nvme_state import padded

__all__ = ["KEPT_JOURNALS", "DirectoryFiles", "Durability", "JournalFile", "StateFiles"]

log = logging.getLogger(__name__)

#: Half of the least time between a checkpoint that failed and the next.
_AFTER_FAILURE_S = 5.0
#: While pages wait for their device: so many times longer between two checkpoints.
_WAITING_EVERY = 10
#: So many times the longest journal for all before the newest, for which the plan of the tier
#: leaves room.
KEPT_JOURNALS = 2
#: Copies that are gone and could not be journalled: so many are, with the next checkpoint.
_UNSAID_MAX = 4096


class Durability:
    """`name_of` translates the store's namespace numbers, which no restart knows."""

    def __init__(
        self,
        files: StateFiles,
        store: Store,
        *,
        name_of: NameOf,
        segment_bytes: int,
        journal_bytes_max: int,
    ) -> None:
        self._files = files
        self._segment_bytes = segment_bytes
        self._journal_bytes_max = journal_bytes_max
        self._store = store
        self._name_of = name_of
        self._journal: JournalFile | None = None
        self._number = 0
        self._can_checkpoint = True
        self._marks: dict[int, int] = {}  # slab -> record bytes, in the present journal
        #: Older journals have to be read by a restart too, and marks in them looked into.
        self._is_owed = False
        self._owed: dict[int, int] = {}
        #: What they take on disk.
        self._older_bytes = 0
        #: The present journal was begun by a checkpoint that has not been written.
        self._is_begun = False
        #: Generations of copies that are gone and that no journal names yet.
        self._unsaid: list[int] = []
        #: Devices that are away or came back empty, and about how many pages each has that the
        #: store has not: checkpoints say so, and the journals since the last that has them stay.
        self.waits: dict[int, int] = {}
        #: Of them, those whose pages were given up: the journals had become too long.
        self.given_up: dict[int, int] = {}
        self._marking: dict[int, asyncio.Task[None]] = {}
        self._checkpointing = asyncio.Lock()
        self._healing = asyncio.Lock()
        # What keeps things from being made durable: by the last look, and by the last write.
        self._look_problem = self._write_problem = ""
        self._checkpoint_at = time.monotonic()
        self._checkpoint_took_s = 0.0
        self.checkpoints = 0
        self.checkpoint_bytes = 0

    @property
    def journal_bytes(self) -> int:
        return self._journal.size_bytes if self._journal is not None else 0

    @property
    def number(self) -> int:
        """Of the newest journal, which is there durably; 0 for none yet."""
        return self._number if self._journal is not None else 0

    @property
    def problem(self) -> str:
        """Why nothing, or less, is made durable at present, and the remedy; "" if nothing is."""
        return self._look_problem or self._write_problem

    @property
    def has_changes(self) -> bool:
        """A checkpoint would save the next start some work."""
        return bool(self._marks) or self._is_owed or self.journal_bytes > 4096

    @property
    def marked_slabs(self) -> dict[int, int]:
        """Slabs that a restart would have to scan, with their record size."""
        return self._owed | self._marks

    def wait_for(self, waits: Mapping[int, int]) -> None:
        """These devices have pages that the store has no more; they come back with a start that
        finds the device. In the same step in which the store loses them."""
        for device, pages in waits.items():
            self.waits[device] = self.waits.get(device, 0) + pages

    async def begin(self, number: int, *, has_base: bool, can_checkpoint: bool = True) -> None:
        """Journals from now on, as number `number`. Raises DirectoryError.

        `has_base`: there is a checkpoint that the journals before this one go on from. Not
        `can_checkpoint`: the tier is not there in this boot, but its pages may be in the next.
        """
        self._can_checkpoint = can_checkpoint
        if not has_base:
            self._number = number - 1
            await self.checkpoint()
            return
        self._is_owed = True  # the journals before
        self._number = number
        self._journal = await self._files.create_journal(number)
        self._older_bytes = await self._files.older_bytes()

    async def mark(self, slab: int, record_bytes: int) -> None:
        """Returns when a restart would look into the slab. Raises DirectoryError."""
        while True:
            under_way = self._marking.get(slab)
            # One that has ended may not have been taken out yet: to wait for it takes no time, and
            # so nobody else would ever have a turn.
            if under_way is None or under_way.done():
                # Not before: the last mark counts, and one of another size, whose callers have all
                # gone and let the segment be bound anew, would come after what is known here.
                if self._marks.get(slab) == record_bytes:
                    return
                under_way = asyncio.create_task(self._mark(slab, record_bytes))
                self._marking[slab] = under_way
                under_way.add_done_callback(lambda task: self._mark_ended(slab, task))
            await asyncio.shield(under_way)

    async def forget(self, generations: Sequence[int]) -> None:
        """These copies do not come back. Raises DirectoryError: not before the next checkpoint has
        been written, which says it."""
        try:
            await self._append([Drop(tuple(generations))])
        except DirectoryError:
            self._unsaid = [*self._unsaid, *generations][-_UNSAID_MAX:]
            raise

    async def know(self, names: int) -> None:
        """A namespace has ended, durably, and the registry is at this number: a start with a file
        of before finds that out. Where it cannot be written the next journal begins with it."""
        if self._journal is not None:
            with suppress(DirectoryError):  # status and log say so
                await self._append([Known(names)])

    def doom(self, namespace: int, shard: int, keys: npt.NDArray[np.uint8]) -> Delete | None:
        """What has to be journalled of a delete that the store has made in this moment: it covers
        every copy that was begun before, and none that is begun from now on."""
        name = self._name_of(namespace)
        if name is None:
            return None  # nothing of an ended namespace comes back
        fingerprint, generation = name
        bound = self._store.snapshots.last_generation
        return Delete(fingerprint, generation, shard, keys.tobytes(), bound)

    async def journal(self, deletes: Sequence[Delete | None]) -> None:
        """Returns when what `doom` gave does not come back. Raises DirectoryError."""
        entries = [delete for delete in deletes if delete is not None]
        nbytes = sum(len(delete.keys) for delete in entries)
        if self.journal_bytes + nbytes > self._journal_bytes_max and self._can_checkpoint:
            await self._begin_anew(entries, nbytes)
            return
        if not entries:
            return
        try:
            await self._append(entries)
        except DirectoryError:
            if not self._can_checkpoint:
                raise
            await self._begin_anew(entries, nbytes)

    async def _begin_anew(self, entries: Sequence[Entry], nbytes: int) -> None:
        """A checkpoint, and a journal for what the one before it had no room for. Where that is
        more than any has room for, the checkpoints alone say it: the store has the pages no more.
        """
        is_short = nbytes <= self._journal_bytes_max
        await self.checkpoint(both=not is_short)
        if entries and (is_short or self.waits):  # no checkpoint has what waits
            await self._append(entries)

    async def confirm(self) -> None:
        """Returns when the files are there that a start needs to find what was made durable. What
        somebody took away, replaced or cut short is written anew: the small files as they were, all
        others as a new checkpoint with a new journal. Raises DirectoryError when that fails.
        """
        try:
            if await self._files.amiss() is not None:
                async with self._healing:
                    await self._heal()
        except DirectoryError as error:
            self._tell(error, of_look=True)
            raise
        self._tell(None, of_look=True)

    async def checkpoint(self, *, both: bool = False) -> None:
        """Makes the present copies on NVMe the base that a restart begins with; with `both` also
        the one that it falls back to.

        Raises DirectoryError; then the journals before it stay, and a restart needs them.
        """
        try:
            async with self._checkpointing:
                await self._checkpoint()
                # While something waits, the one before it is for that.
                is_long = self._older_bytes > KEPT_JOURNALS * self._journal_bytes_max
                if (both or is_long) and not self.waits:
                    await self._checkpoint()
        except DirectoryError as error:
            self._tell(error)
            raise
        self._tell(None)

    async def _checkpoint(self) -> None:
        started = time.monotonic()
        is_again = self._is_begun and await self._goes_on()
        number = self._number + (not is_again)
        before = None
        if not is_again:
            following = await self._files.create_journal(number)
            # No await from here to the end of `take`: what changes before it is in the image, what
            # changes after it in the new journal.
            before, self._journal, self._number = self._journal, following, number
            self._older_bytes += padded(before.size_bytes, 4096) if before is not None else 0
            self._owed, self._marks, self._is_owed = self._owed | self._marks, {}, True
            self._is_begun = True
        self._give_up_what_is_too_long()
        waits = dict(self.waits)
        taken = self._store.snapshots.take(Tier.NVME)
        # Its entry waits to be written before this gives way to anybody: a later mark of the
        # same segment comes after it.
        try:
            await self._say_first(taken)
        finally:
            if before is not None:
                await before.close()
        crash_point("checkpoint.begun")
        snapshot = await asyncio.to_thread(snapshot_of, taken, waits, self._name_of)
        self.checkpoint_bytes = await self._files.write_checkpoint(snapshot, number)
        self._is_begun = False
        crash_point("checkpoint.renamed")
        await self._files.remove_old()
        self._older_bytes = await self._files.older_bytes()
        self.checkpoints += 1
        self._owed, self._is_owed = {}, False
        self._checkpoint_at = time.monotonic()
        self._checkpoint_took_s = self._checkpoint_at - started
        log.info(
            "nvme.checkpoint",
            extra={"number": number, "pages": len(snapshot.pages), "bytes": self.checkpoint_bytes},
        )

    async def _goes_on(self) -> bool:
        """Whether a checkpoint that failed is tried again with the journal that it has begun: else
        each try would leave one. What that says and the image says too does no harm."""
        journal = self._journal
        if journal is None or journal.failed:
            return False
        return await self._files.amiss() is None

    async def checkpoint_if_due(self, *, every_s: float, slots_max: int) -> None:
        """A checkpoint, if the last one is old enough, or what a restart would have to read since
        it has become much: the journal, or the slots of marked segments. Raises DirectoryError."""
        is_broken = self._journal is not None and self._journal.failed
        is_broken = is_broken or bool(self._write_problem)
        if not self.has_changes and not is_broken:
            return
        age_s = time.monotonic() - self._checkpoint_at
        slots = sum(self._segment_bytes // size for size in self.marked_slabs.values())
        journals_bytes = self.journal_bytes + self._older_bytes
        is_much = journals_bytes > (KEPT_JOURNALS + 1) * self._journal_bytes_max
        if self.waits:
            # Every journal is kept: few of them; and the start that finds the device reads all.
            every_s, slots, is_much = every_s * _WAITING_EVERY, 0, False
        is_much |= self.journal_bytes > self._journal_bytes_max or slots > slots_max
        # However much is written, a checkpoint is at most every second one's work.
        if age_s >= every_s or ((is_much or is_broken) and age_s >= 2 * self._checkpoint_took_s):
            # Should it fail, the next try is not at once.
            self._checkpoint_at, self._checkpoint_took_s = time.monotonic(), _AFTER_FAILURE_S
            await self.checkpoint()

    def _give_up_what_is_too_long(self) -> None:
        """Journals are kept for devices that are away as long as there is room for them."""
        if self.waits and self._older_bytes > KEPT_JOURNALS * self._journal_bytes_max:
            log.error("nvme.pages_given_up", extra={"pages_of_device": dict(self.waits)})
            self.given_up |= self.waits
            self.waits = {}

    async def close(self) -> None:
        """Returns when everything is on disk that was asked to be."""
        async with self._checkpointing:
            if self._journal is not None:
                await self._journal.close()
                self._journal = None

    async def _append(self, entries: Sequence[Entry]) -> None:
        if self._journal is None:
            raise DirectoryError(
                "the journal of the NVMe tier is not open",
                remedy="The daemon is ending: do it again when it is back.",
            )
        try:
            await self._journal.append(entries, sync=True)
        except DirectoryError as error:
            self._tell(error)
            raise

    async def _heal(self) -> None:
        async with self._checkpointing:
            pass  # one that is being written may make it good
        error = await self._files.amiss()  # those who waited here find it done
        if error is None:
            return
        if not self._can_checkpoint:
            raise error
        log.warning("nvme.state_rebuilt", extra={"what": str(error)})
        await self.checkpoint(both=True)

    def _tell(self, error: DirectoryError | None, *, of_look: bool = False) -> None:
        """What came of a look, or of a write; the log hears of changes alone."""
        before = self.problem
        words = f"{error}; remedy: {error.remedy}" if error is not None else ""
        if of_look:
            self._look_problem = words
        else:
            self._write_problem = words
        if self.problem and self.problem != before and error is not None:
            log.error("nvme.journal_failed", extra={"error": str(error), "remedy": error.remedy})
        elif before and not self.problem:
            log.info("nvme.journal_works", extra={"before": before})

    async def _mark(self, slab: int, record_bytes: int) -> None:
        number = self._number
        try:
            await self._append([Mark(slab, record_bytes)])
        except DirectoryError:
            self._marks.pop(slab, None)  # it may have been written, or not
            raise
        if number == self._number:  # else it is in a journal that a restart need not read
            self._marks[slab] = record_bytes

    def _mark_ended(self, slab: int, task: asyncio.Task[None]) -> None:
        if self._marking.get(slab) is task:
            del self._marking[slab]
        if not task.cancelled():
            task.exception()  # those who would have heard of it may be gone

    async def _say_first(self, taken: TierImage) -> None:
        """Copies that were being made when the image was taken lie in segments marked before. And
        what could not be journalled: the image says it, but not to who begins with an older one."""
        slabs = {taken.slab_of(slot) for _, slot in taken.in_flight}
        marks = {slab: taken.bindings[slab] for slab in slabs if slab in taken.bindings}
        entries: list[Entry] = [Mark(slab, size) for slab, size in marks.items()]
        unsaid, self._unsaid = self._unsaid, []
        if unsaid:
            entries.append(Drop(tuple(unsaid)))
        if not entries:
            return
        try:
            await self._append(entries)
        except BaseException:
            self._unsaid = [*unsaid, *self._unsaid][-_UNSAID_MAX:]
            raise
        self._marks = marks | self._marks
