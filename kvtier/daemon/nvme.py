"""The NVMe tier of a daemon: opened, recovered, kept going, ended.

`nvme_open.prepare` has opened the devices. `start` brings back what earlier boots left, when the
store and the registry are there; from then on the parts run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import numpy as np

from kvtier.config import CodecName
from kvtier.core.budget import WriteBudget
from kvtier.core.page import KEY_BYTES, Codec, Tier
from kvtier.core.snapshots import Copies
from kvtier.core.store import Store
from kvtier.daemon.device_health import DeviceHealth
from kvtier.daemon.device_notes import DeviceNotes
from kvtier.daemon.devices import Devices
from kvtier.daemon.durability import DirectoryFiles, Durability
from kvtier.daemon.metrics import Samples
from kvtier.daemon.nvme_open import DIRECT_MODES, NvmeParts
from kvtier.daemon.registry import Registry
from kvtier.daemon.scrub import NvmeSegments
from kvtier.daemon.state import DaemonDirectory
from kvtier.daemon.tiering import Tiering
from kvtier.errors import DirectoryError
from kvtier.tiers.base import SLOT_BYTES
from kvtier.tiers.host import HostArena
from kvtier.tiers.nvme_geometry import (
    GEOMETRY_FILE,
    journal_bytes_max,
    slab_number,
    split_slab,
    whole_mib,
)
from kvtier.tiers.nvme_old_files import remove_old
from kvtier.tiers.nvme_recovery import Recovered, RecoveryReport, recover
from kvtier.tiers.nvme_segment import segment_name, segment_number
from kvtier.transfer.mover import Mover

__all__ = ["NvmeService"]

log = logging.getLogger(__name__)

_CODECS = {CodecName.RAW: Codec.RAW, CodecName.FP8: Codec.FP8}
#: Headers that a start can read in about a second: more marked slots ask for a checkpoint.
_SCAN_SLOTS_MAX = 50_000
_CLEAN_S = 0.05
_SWEEP_S = 0.1
_FILES_S = 1.0
#: What each step of the end may take after the drain deadline.
_END_MOVES_S, _END_SYNC_S, _END_CHECKPOINT_S = 1.0, 2.0, 5.0
_CLEAN_PAUSE_MAX_S = 2.0


class NvmeService:
    """The running tier. Event loop's thread."""

    def __init__(
        self,
        parts: NvmeParts,
        store: Store,
        arena: HostArena,
        registry: Registry,
        *,
        directory: DaemonDirectory,
    ) -> None:
        directory.mind(*GEOMETRY_FILE)
        config = parts.config
        self.parts = parts
        self._store = store
        self._registry = registry
        self.durability = Durability(
            DirectoryFiles(
                parts.directory,
                parts.geometry.directory_id,
                keep=directory.keep,
                names=lambda: registry.last_number,
            ),
            store,
            name_of=registry.name_of,
            segment_bytes=parts.geometry.segment_bytes,
            journal_bytes_max=journal_bytes_max(config.bytes),
        )
        self.devices = Devices(parts.tier, store, self.durability, parts.plan, config)
        self._notes = DeviceNotes(
            self.devices, self.durability, store, registry, retry_s=config.retry_s
        )
        self.mover = Mover(store, arena, self.devices, codec=_CODECS[config.codec])
        self.tiering = Tiering(
            store,
            self.mover,
            config,
            subject_of=registry.subject_of,
            budget=WriteBudget(config.write_bytes_per_day, time.monotonic()),
            streams=config.io_threads * len(parts.tier.devices),
            confirm=self.devices.check_files,
            is_kept=self._is_kept,
        )
        self.report: RecoveryReport | None = None
        #: Of segments whose file was rejected: pages that the checkpoint lists there.
        self.pages_rejected: dict[tuple[int, str], int] = {}
        self._clean_pause_s = 0.0

    async def start(self) -> None:
        """Brings the pages of earlier boots back. Raises KvtierError."""
        started = time.monotonic()
        recovered = await asyncio.to_thread(self._recover)
        self.report = recovered.report
        for slab, pages in recovered.unplaced.items():
            number, local = split_slab(slab)
            self.pages_rejected[number, segment_name(local)] = pages
        for what in recovered.report.warnings():
            log.warning("nvme.recovery", extra={"what": what})
        if recovered.refusal is not None:
            raise recovered.refusal
        await asyncio.to_thread(self.parts.remove_segments_over)
        pages = self._load(recovered)
        self.durability.wait_for(recovered.waits)
        await self.durability.begin(
            recovered.next_number, has_base=recovered.base_number is not None
        )
        if recovered.report.forgotten:
            # They lack entries, and are kept for nothing: no later start may begin with them.
            with suppress(DirectoryError):  # status and log say so
                await self.durability.checkpoint(both=True)
        await self.devices.probe_all()
        await self._notes.note()
        log.info(
            "nvme.recovered",
            extra={
                "pages": pages,
                "segments": len(self.parts.tier.slabs()),
                "scanned": recovered.report.segments_scanned,
                "seconds": round(time.monotonic() - started, 3),
            },
        )

    def loops(self) -> list[tuple[str, Callable[[], Awaitable[object]], float]]:
        """What the tier does by itself from READY on: (name, work, seconds between two times)."""
        config = self.parts.config
        return [
            ("nvme clean", self._clean, _CLEAN_S),
            ("nvme sync", self.devices.sync, config.sync_s),
            ("nvme files", self.devices.check_files, _FILES_S),
            ("nvme note", self._notes.note, _FILES_S),
            ("nvme retry", self.devices.retry, min(config.retry_s, 1.0)),
            ("nvme sweep", self.devices.sweep, _SWEEP_S),
            ("nvme checkpoint", self._checkpoint_if_due, min(config.checkpoint_s, 1.0)),
        ]

    def copy_again(self, namespace: int, shard: int, key: bytes) -> None:
        """A copy was condemned: if the page is in host memory too, it goes down once more, so that
        what was called durable is so again."""
        keys = np.frombuffer(key, np.uint8).reshape(1, KEY_BYTES)
        self.tiering.demote((namespace, shard), keys)

    def segments_to_scrub(self) -> NvmeSegments:
        """The segment files, for a scrub that reads them itself."""
        return NvmeSegments(tier=self.parts.tier, direct=DIRECT_MODES[self.parts.config.direct_io])

    async def stop(self, until: float) -> int:
        """Copies down what there is time for, and checkpoints; pages that are lost with the
        process. `until` is in monotonic seconds; a device that hangs costs some seconds more."""
        lost = await self.tiering.flush_all(until)
        if not await self._is_kept():
            lost = self._store.status()[Tier.HOST].sealed  # no start finds any of them
        await self._within(_END_MOVES_S, self.tiering.close())
        await self._within(_END_SYNC_S, self.devices.sync())
        await self._within(_END_CHECKPOINT_S, self.durability.checkpoint())
        await self._within(_END_SYNC_S, self._notes.note(is_last=True))
        return lost

    async def close(self) -> None:
        """Ends everything, whatever state it is in."""
        await self._within(_END_MOVES_S, self.tiering.close())
        await self._within(_END_CHECKPOINT_S, self.durability.close())
        self._notes.close()
        self.devices.close()
        self.parts.tier.close()

    async def _within(self, seconds: float, work: Awaitable[None]) -> None:
        """The end of the process waits for no device, and for no full disk."""
        try:
            async with asyncio.timeout(seconds):
                await work
        except (DirectoryError, TimeoutError) as error:
            log.error("nvme.end_cut_short", extra={"error": str(error) or f"over {seconds:g} s"})

    # -- what is said about it -------------------------------------------------------------------

    def warnings(self) -> Iterator[str]:
        for path, reason in self.parts.unusable.items():
            yield f"nvme: {path} is not used: {reason}"
        if self.mover.too_long_bytes:
            # A segment is a 16th of a device's share, fixed when the tier is made.
            least = 16 * len(self.parts.config.paths) * self.mover.too_long_bytes
            yield (
                f"nvme: records of {self.mover.too_long_bytes} bytes do not fit a segment"
                f" ({self.devices.segment_bytes} bytes) and are never there: set nvme.bytes to"
                f" {whole_mib(least)} or more and start once with --discard-cache"
            )
        for health in self.devices.health.values():
            path = health.device.path
            if not health.online:
                yield f"nvme: {path} is offline: {health.reason}"
            elif health.read_only:
                yield (
                    f"nvme: {path} is read-only: its pages are served, no others go there"
                    f" ({health.reason}); mount it writable, the daemon tries again by itself"
                )
            elif health.reason:
                yield f"nvme: {path} cannot grow: {health.reason}{self._too_large(health)}"
            if health.device.io_reason:
                yield f"nvme: {path} goes through the page cache: {health.device.io_reason}"
            for what in health.device.rejected:
                name = what.partition(":")[0]
                lost = self.pages_rejected.get((health.device.number, name), 0)
                yield (
                    f"nvme: {path / name}{what[len(name) :]}; its pages ({lost} were listed there)"
                    f" are misses; check the device (kernel log); {self._later(health, name)}"
                )
        yield from self._waiting()
        if self.report is not None:
            yield from (f"nvme: {what}" for what in self.report.warnings())

    def _too_large(self, health: DeviceHealth) -> str:
        if health.segments or "ENOSPC" not in health.reason:
            return ""
        return (
            f"; a segment takes {self.devices.segment_bytes} bytes there, the 16th of a device's"
            " share of nvme.bytes when the tier was made: free as much, or set nvme.bytes to what"
            " the file system holds and start once with --discard-cache"
        )

    def _later(self, health: DeviceHealth, name: str) -> str:
        local = segment_number(name)
        if local in health.occupied and local in health.device.unreadable_segments:
            return "the next start tries to read it again"
        return "the file is replaced when its place is needed"

    def _waiting(self) -> Iterator[str]:
        paths = {number: str(path) for number, path in self.parts.geometry.devices}
        online = {number for number, health in self.devices.health.items() if health.online}
        for number, pages in sorted(self.durability.waits.items()):
            name = f"{paths.get(number, 'a path that is not known any more')} (device {number})"
            if number in online:
                how = "come back there with the next start"
            else:
                how = "wait for it: name it in nvme.paths, mount it, and start again"
            yield f"nvme: about {pages} pages on {name} cannot be read now and {how}"
        for number, pages in sorted(self.durability.given_up.items()):
            name = f"{paths.get(number, 'a path that is not known any more')} (device {number})"
            yield f"nvme: about {pages} pages on {name} were given up: it was away for too long"

    def path_of(self, slot: int) -> str:
        """The directory of the device where the slot lies."""
        number, _ = split_slab(slot // (self.devices.segment_bytes // SLOT_BYTES))
        return str(self.devices.health[number].device.path)

    def place(self, slot: int) -> str:
        """The file of the slot, and the slot."""
        _, local = split_slab(slot // (self.devices.segment_bytes // SLOT_BYTES))
        return f"{self.path_of(slot)}/{segment_name(local)} slot {slot}"

    def readings(self) -> dict[str, Samples]:
        """Values of the metrics of this tier. Any thread."""
        mover, devices, durability = self.mover, self.devices, self.durability
        health = list(devices.health.values())
        return {
            "kvtier_moves_total": {
                (way, code.value): count
                for way, counts in (("down", mover.demotions), ("up", mover.promotions))
                for code, count in list(counts.items())
            },
            "kvtier_moves_dropped_total": {
                (reason,): count for reason, count in list(self.tiering.dropped.items())
            },
            "kvtier_moves_under_way": {(): self.tiering.under_way},
            "kvtier_nvme_bytes_total": {
                ("written",): mover.bytes_written,
                ("read",): mover.bytes_read,
            },
            "kvtier_nvme_disk_bytes": {(str(h.device.path),): h.disk_bytes for h in health},
            "kvtier_nvme_device_online": {(str(h.device.path),): h.online for h in health},
            "kvtier_nvme_lost_pages_total": {(str(h.device.path),): h.pages_lost for h in health},
            "kvtier_nvme_io_errors_total": {(): devices.io_errors},
            "kvtier_nvme_no_room_total": {(): devices.no_room},
            "kvtier_nvme_checkpoints_total": {(): durability.checkpoints},
            "kvtier_nvme_journal_bytes": {(): durability.journal_bytes},
            "kvtier_nvme_recovered": {
                (name,): count
                for name, count in (self.report.counts() if self.report else {}).items()
            },
        }

    async def _is_kept(self) -> bool:
        """Whether a start would find what is on NVMe now."""
        try:
            await self.durability.confirm()
        except DirectoryError:
            return False  # status and log say so
        return True

    # -- recovery --------------------------------------------------------------------------------

    def _recover(self) -> Recovered:
        """A thread of its own: what the files say."""
        tier = self.parts.tier
        remove_old(self.parts.directory, keep_from=0)  # no journal: what was being written then
        families = self._registry.families()
        return recover(
            self.parts.directory,
            directory_id=self.parts.geometry.directory_id,
            tier=tier,
            slabs=self._slabs(),
            segment_bytes=tier.segment_bytes,
            generations={f.identity.fingerprint: f.generation for f in families},
            generation_floor=self._registry.generation_floor,
            generation_bound=self._store.snapshots.last_generation,
            names=self._registry.last_number,
            noted={device.path: device.directory.noted for device in tier.devices},
            is_expected=self._is_expected,
            present=[device.number for device in tier.devices],
            unreadable=[
                slab_number(device.number, local)
                for device in tier.devices
                for local in device.unreadable_segments
                if local < self.parts.plan.segments_per_device
            ],
            threads=self.parts.config.io_threads,
        )

    def _is_expected(self, slab: int) -> bool:
        """Whether a segment that held pages should be there: neither over the cap, nor of a device
        that is not used, nor named as rejected already."""
        number, local = split_slab(slab)
        devices = {device.number: device for device in self.parts.tier.devices}
        if number not in devices or local >= self.parts.plan.segments_per_device:
            return False
        return local not in devices[number].rejected_segments

    def _slabs(self) -> list[int]:
        """The segments that are there, within the cap."""
        limit = self.parts.plan.segments_per_device
        return [slab for slab in self.parts.tier.slabs() if split_slab(slab)[1] < limit]

    def _load(self, recovered: Recovered) -> int:
        slabs = set(self._slabs())
        self.devices.adopt(sorted(slabs - recovered.unread), spared=recovered.unread)
        numbers = {
            (family.identity.fingerprint, family.generation): family.number
            for family in self._registry.families()
        }
        of_family = np.array([numbers[name] for name in recovered.families], np.uint32)
        pages = recovered.pages
        copies = Copies(
            namespace=of_family[pages.family],
            shard=pages.shard,
            key=pages.key,
            generation=pages.generation,
            slot=pages.slot,
            length=pages.length,
            codec=pages.codec,
            lossy=pages.lossy,
            parent=pages.parent,
        )
        return self._store.snapshots.load(Tier.NVME, recovered.classes, copies)

    # -- loops -----------------------------------------------------------------------------------

    async def _clean(self) -> None:
        tried, done = await self.tiering.clean()
        while done:
            self._clean_pause_s = 0.0
            tried, done = await self.tiering.clean()
        if tried:  # nothing goes down now: ask less and less often
            self._clean_pause_s = min(2 * self._clean_pause_s + _CLEAN_S, _CLEAN_PAUSE_MAX_S)
            await asyncio.sleep(self._clean_pause_s)

    async def _checkpoint_if_due(self) -> None:
        with suppress(DirectoryError):  # status and log say so, once
            await self.durability.checkpoint_if_due(
                every_s=self.parts.config.checkpoint_s, slots_max=_SCAN_SLOTS_MAX
            )
