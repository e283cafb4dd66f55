"""The daemon directory of a simulated machine: it outlives every boot, and knows what a crash and
a power cut leave of it.

What is written survives the process; only what was synced survives a power cut, and of the rest a
random part. `StateDisk` is the disk, `BootFiles` the StateFiles of one boot on it. The bytes are
those of the real encoders, and a restart reads them from real files with the real `recover`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from kvtier.errors import DirectoryError
from kvtier.tiers.nvme_checkpoint import CHECKPOINT, CHECKPOINT_OLD, encode_checkpoint
from kvtier.tiers.nvme_frames import Entry, Known, encode_frame, encode_head, frame_seed
from kvtier.tiers.nvme_noted import Noted
from kvtier.tiers.nvme_snapshot import Snapshot
from kvtier.tiers.nvme_state import padded
from tests.sim.scheduler import Scheduler

__all__ = ["BootFiles", "SimJournal", "StateDisk"]

DIRECTORY_ID = bytes(range(16))
_CHECKPOINT_HEAD_BYTES = 128


@dataclass(slots=True)
class JournalImage:
    """A journal on disk: its bytes after the head, the first `synced` of which are safe."""

    number: int
    frames: bytearray = field(default_factory=bytearray)
    synced: int = 0
    is_named: bool = False  # its name survives a power cut

    @property
    def content(self) -> bytes:
        return encode_head(DIRECTORY_ID, self.number) + self.frames

    def sync(self) -> None:
        self.synced = len(self.frames)


@dataclass(slots=True)
class CheckpointImage:
    """`waits`: it lacks the pages of a device."""

    number: int
    content: bytes
    is_whole: bool = True
    waits: bool = False


#: (checkpoint, checkpoint.old)
View = tuple[CheckpointImage | None, CheckpointImage | None]


class StateDisk:
    """Everything of a daemon directory, and which segment files there are."""

    path: ClassVar[Path] = Path("disk")  # for the texts of errors

    def __init__(self) -> None:
        self.journals: dict[int, JournalImage] = {}
        self.unlinked: dict[int, JournalImage] = {}  # since the directory was synced
        #: The names of the checkpoints: as they were synced, then after each renaming since.
        self.views: list[View] = [(None, None)]
        self.generation_bound = 0
        self.namespaces: dict[str, Any] = {}
        self.segments: set[int] = set()
        #: What the devices know of it; it is theirs, and safe when it is written.
        self.noted = Noted()
        #: Saving the registry fails as long as this is so.
        self.refuses_names = False

    # What the real registry asks of a daemon directory.

    def load_namespaces(self) -> dict[str, Any]:
        return self.namespaces

    def save_namespaces(self, state: dict[str, Any]) -> None:
        if self.refuses_names:
            raise _refused("namespaces")
        self.namespaces = state

    def journal_generations(self, bound: int) -> None:
        self.generation_bound = bound

    # What happens to it.

    def sync_names(self) -> None:
        """The directory is synced: no name changes any more."""
        self.views = self.views[-1:]
        self.unlinked.clear()
        for journal in self.journals.values():
            journal.is_named = True

    def power_cut(self, rng: random.Random) -> None:
        del self.views[rng.randint(1, len(self.views)) :]
        for journal in list(self.journals.values()):
            if not journal.is_named and rng.random() < 0.5:
                del self.journals[journal.number]
        for number, journal in self.unlinked.items():
            if rng.random() < 0.5:
                self.journals[number] = journal
        for journal in self.journals.values():
            lost = bytes(journal.frames[journal.synced :])
            kept = _part(lost, rng)
            # The length of a file can get to the disk before the bytes.
            journal.frames[journal.synced :] = (
                kept.ljust(len(lost), b"\0") if rng.random() < 0.3 else kept
            )
            journal.sync()
        self.sync_names()

    def damage_checkpoint(self, rng: random.Random, *, newest: bool) -> bool:
        """Flips a bit in one of the checkpoints, if it is there."""
        views = list(self.views[-1])
        image = views[0 if newest else 1]
        if image is None:
            return False
        content = bytearray(image.content)
        content[rng.randrange(_CHECKPOINT_HEAD_BYTES, len(content))] ^= 1 << rng.randrange(8)
        views[0 if newest else 1] = replace(image, content=bytes(content), is_whole=False)
        self.views = [(views[0], views[1])]
        return True

    def write_to(self, directory: Path) -> None:
        """The files as a start finds them."""
        for path in directory.iterdir():
            path.unlink()
        for name, image in zip((CHECKPOINT, CHECKPOINT_OLD), self.views[-1], strict=True):
            if image is not None:
                (directory / name).write_bytes(image.content)
        for number, journal in self.journals.items():
            (directory / f"journal-{number:010d}").write_bytes(journal.content)


class BootFiles:
    """kvtier.daemon.durability.StateFiles, with every step an event. `failing` is the chance of a
    write to be refused."""

    def __init__(
        self, disk: StateDisk, scheduler: Scheduler, rng: random.Random, *, failing: float
    ) -> None:
        self.disk = disk
        self.scheduler = scheduler
        self.rng = rng
        self.failing = failing
        self.failures = 0
        self._journals: list[SimJournal] = []
        self._is_killed = False

    async def create_journal(self, number: int) -> SimJournal:
        await self.scheduler.pause()
        self.refuse_sometimes("a journal")
        assert number not in self.disk.journals, f"journal {number} is there already"
        for before in self.disk.journals.values():
            before.sync()
        opening = Known(int(self.disk.namespaces.get("last_number", 0)))
        frame = encode_frame([opening], frame=0, seed=frame_seed(DIRECTORY_ID, number))
        image = self.disk.journals[number] = JournalImage(number, bytearray(frame))
        try:
            await self.scheduler.pause()
            image.sync()
            self.disk.sync_names()
            await self.scheduler.pause()
        except BaseException:
            if not self._is_killed:
                del self.disk.journals[number]
            raise
        journal = SimJournal(self, image)
        self._journals.append(journal)
        return journal

    async def write_checkpoint(self, snapshot: Snapshot, number: int) -> int:
        disk = self.disk
        parts = encode_checkpoint(snapshot, number=number, directory_id=DIRECTORY_ID)
        content = b"".join(parts)
        await self.scheduler.pause()
        self.refuse_sometimes("the checkpoint")
        newest, old = disk.views[-1]
        # The last one that has the pages of devices that are away stays where it is.
        is_awaited = old is not None and old.is_whole
        if newest is not None and newest.is_whole and not (newest.waits and is_awaited):
            disk.views.append((None, newest))
            old = newest
            await self.scheduler.pause()
        image = CheckpointImage(number, content, waits=bool(snapshot.waits))
        disk.views.append((image, old))
        await self.scheduler.pause()
        disk.sync_names()
        await self.scheduler.pause()
        return len(content)

    async def remove_old(self) -> None:
        images = [image for image in self.disk.views[-1] if image is not None]
        keep_from = min(image.number for image in images)
        for number in sorted(number for number in self.disk.journals if number < keep_from):
            await self.scheduler.pause()
            self.disk.unlinked[number] = self.disk.journals.pop(number)

    async def older_bytes(self) -> int:
        sizes = [len(image.content) for _, image in sorted(self.disk.journals.items())]
        return sum(padded(size, 4096) for size in sizes[:-1])

    async def amiss(self) -> None:
        """Nobody takes files away here."""

    def refuse_sometimes(self, what: str) -> None:
        if self.rng.random() < self.failing:
            self.failures += 1
            raise _refused(what)

    def kill(self) -> None:
        """The process ends: of appends under way a part may be there."""
        self._is_killed = True
        for journal in self._journals:
            journal.kill(self.rng)


class SimJournal:
    """See nvme_journal.Journal: appends that wait together are one write, then one sync."""

    def __init__(self, files: BootFiles, image: JournalImage) -> None:
        self._files = files
        self._image = image
        self._seed = frame_seed(DIRECTORY_ID, image.number)
        self._frames = 1  # after the opening
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._written: list[tuple[bytes, asyncio.Future[None]]] = []
        self._is_busy = False
        self._is_closed = False
        self._idle: list[asyncio.Future[None]] = []
        self.failed = False
        self.size_bytes = len(image.content)

    async def append(self, entries: Sequence[Entry], *, sync: bool) -> None:
        if self.failed or self._is_closed:
            raise _refused("a journal that is closed or has failed")
        frame = encode_frame(entries, frame=self._frames, seed=self._seed)
        self._frames += 1
        self.size_bytes += len(frame)
        done = self._files.scheduler.loop.create_future()
        self._waiting.append((frame, done))
        if not self._is_busy:
            self._is_busy = True
            self._files.scheduler.add(self._write)
        await done

    async def close(self) -> None:
        self._is_closed = True
        if self._is_busy:
            idle = self._files.scheduler.loop.create_future()
            self._idle.append(idle)
            await idle

    def kill(self, rng: random.Random) -> None:
        if self._waiting and not self.failed:
            self._image.frames += _part(b"".join(frame for frame, _ in self._waiting), rng)

    def _write(self) -> None:
        self._written, self._waiting = self._waiting, []
        frames = b"".join(frame for frame, _ in self._written)
        try:
            self._files.refuse_sometimes("the journal")
        except DirectoryError as error:
            self._image.frames += _part(frames, self._files.rng)
            self._fail(error)
            return
        self._image.frames += frames
        self._files.scheduler.add(self._sync)

    def _sync(self) -> None:
        try:
            self._files.refuse_sometimes("a sync of the journal")
        except DirectoryError as error:
            self._fail(error)
            return
        self._image.sync()
        self._files.scheduler.add(self._answer)

    def _answer(self) -> None:
        for _, done in self._written:
            if not done.done():  # else its caller was cancelled
                done.set_result(None)
        self._written = []
        if self._waiting:
            self._files.scheduler.add(self._write)
        else:
            self._rest()

    def _fail(self, error: DirectoryError) -> None:
        self.failed = True
        for _, done in (*self._written, *self._waiting):
            if not done.done():
                done.set_exception(error)
        self._written, self._waiting = [], []
        self._rest()

    def _rest(self) -> None:
        self._is_busy = False
        for idle in self._idle:
            if not idle.done():
                idle.set_result(None)
        self._idle = []


def _part(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randint(0, len(data))]


def _refused(what: str) -> DirectoryError:
    return DirectoryError(f"{what} was not written: simulated", remedy="none, it is a test")
