"""Everything one running daemon is made of, in one object that the services get.

The event loop's thread owns it; the metrics thread reads it (`readings`), and the populate thread
grants slabs to the store, which has a lock of its own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import partial

from kvtier._version import __version__
from kvtier.config import Config
from kvtier.config import Verify as VerifySetting
from kvtier.core.handles import Reading
from kvtier.core.page import Codec, Tier
from kvtier.core.store import Counters, Store
from kvtier.daemon.admission import Admission
from kvtier.daemon.durability import Durability
from kvtier.daemon.flushing import Unflushed
from kvtier.daemon.forecasts import ForecastFile
from kvtier.daemon.local_plane import LocalPlane
from kvtier.daemon.metrics import NVME_METRICS, Metrics, Samples
from kvtier.daemon.nvme import NvmeService
from kvtier.daemon.nvme_open import NvmeParts
from kvtier.daemon.pools import DevicePools
from kvtier.daemon.put_reports import PutReport, PutReports
from kvtier.daemon.registry import Registry
from kvtier.daemon.scrub import Scrubber, ScrubParts
from kvtier.daemon.sessions import Session, Sessions
from kvtier.daemon.state import DaemonDirectory
from kvtier.errors import DaemonUnavailable, DirectoryError, TierIOError, UnknownHandle
from kvtier.packing.record import HEADER_BYTES
from kvtier.tiers.host import HostArena
from kvtier.transfer.mover import MoveCode
from kvtier.transfer.place import Identity, Place, Why, failed, load
from kvtier.transfer.place import Verify as VerifyMode

__all__ = ["Node", "NodeState", "Parts"]

log = logging.getLogger(__name__)

_VERIFY = {
    VerifySetting.ALWAYS: VerifyMode.ALWAYS,
    VerifySetting.SAMPLED: VerifyMode.SAMPLED,
    VerifySetting.OFF: VerifyMode.OFF,
}


class NodeState(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a node is built from; made and closed by `run`."""

    config: Config
    boot_id: int
    directory: DaemonDirectory
    arena: HostArena
    store: Store
    forecasts: ForecastFile
    nvme: NvmeParts | None = None
    local: LocalPlane | None = None


@dataclass(slots=True)
class DrainRequest:
    """Set once: when to stop waiting, in monotonic seconds."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    deadline: float = 0.0
    #: Everything is done that there was time for; so many pages are lost with the process.
    done: asyncio.Event = field(default_factory=asyncio.Event)
    pages_lost: int = 0


class Node:
    def __init__(self, parts: Parts) -> None:
        self.config = parts.config
        self.boot_id = parts.boot_id
        self.directory = parts.directory
        self.arena = parts.arena
        self.store = parts.store
        self.local = parts.local
        self.forecasts = parts.forecasts
        limits = self.config.limits
        self.state = NodeState.STARTING
        self.started_at = time.monotonic()
        self.listening: list[str] = []
        #: Path of the local plane's control socket while that plane serves, else empty.
        self.local_socket = ""
        self.metrics_url = ""
        self.registry = Registry(parts.directory, parts.store, namespaces_max=limits.namespaces_max)
        self.nvme: NvmeService | None = None
        if parts.nvme is not None:
            self.nvme = NvmeService(
                parts.nvme, self.store, self.arena, self.registry, directory=self.directory
            )
        self.unflushed = Unflushed(self.store)
        self.put_reports = PutReports(self._local_put)
        #: What deletes have to be told to: the tier's, or that of a tier that is off in this boot.
        self.durability: Durability | None = self.nvme.durability if self.nvme else None
        self.admission = Admission(limits)
        self.pools = DevicePools()
        self.sessions: Sessions[Place] = Sessions(
            clock=time.monotonic,
            ttl_s=limits.session_ttl_s,
            sessions_max=limits.sessions_max,
            handles_per_session_max=limits.handles_per_session_max,
            on_end=self._session_ended,
            has_ended=lambda place: self.registry.family_of(place.namespace) is None,
        )
        self.scrubber = Scrubber(
            ScrubParts(
                store=parts.store,
                arena=parts.arena,
                identity_of=self.registry.identity_of,
                recheck=self._recheck,
                condemn=self._condemn,
                nvme=self.nvme.segments_to_scrub() if self.nvme else None,
                confirm=self.nvme.devices.check_files if self.nvme else None,
                lost=self.nvme.copy_again if self.nvme else None,
            )
        )
        self.metrics = Metrics(self.readings)
        self.drain = DrainRequest()
        #: Calls that carry it are the daemon's own and pass while it is starting.
        self.self_test_token = secrets.token_hex(16)
        self._warnings: list[str] = []
        self._state_problem = ""
        self._counters_before = Counters()

    # -- limits and settings as the services need them -------------------------------------------

    @property
    def page_bytes_max(self) -> int:
        """The longest payload that fits a slab with its header."""
        return self.arena.slab_bytes - HEADER_BYTES

    @property
    def verify(self) -> VerifyMode:
        return _VERIFY[self.config.host.verify]

    @property
    def planes(self) -> tuple[str, ...]:
        """Those that serve."""
        return ("grpc", "local") if self.local_socket else ("grpc",)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return tuple(Codec)

    def lease_s(self, ttl_ms: int) -> float:
        """The life that a lease gets when `ttl_ms` is asked for (0: the default)."""
        limits = self.config.limits
        return min(ttl_ms or limits.lease_ms_default, limits.lease_ms_max) / 1000

    # -- what is said about it ---------------------------------------------------------------------

    @property
    def warnings(self) -> list[str]:
        """Everything that runs in a lesser way than configured."""
        degraded = self.arena.degraded
        return [
            *self._warnings,
            *self._state_problems(),
            *([f"host tier: {degraded}"] if degraded else []),
            *(self.nvme.warnings() if self.nvme else ()),
            *self.scrubber.problems,
            *self._quarantined(),
        ]

    def _state_problems(self) -> list[str]:
        found = [self._state_problem, self.durability.problem if self.durability else ""]
        return [what for what in dict.fromkeys(found) if what]

    async def confirm_state(self) -> None:
        """Looks whether the daemon directory still is what a start needs, and makes it good."""
        try:
            if self.durability is not None:
                await self.durability.confirm()
            else:
                await asyncio.to_thread(self.directory.keep)
        except DirectoryError as error:
            if not self._state_problem and self.durability is None:  # else that has said so
                extra = {"error": str(error), "remedy": error.remedy}
                log.error("daemon.state_lost", extra=extra)
            self._state_problem = f"{error}; remedy: {error.remedy}"
        else:
            self._state_problem = ""

    def _quarantined(self) -> list[str]:
        places = Counter(
            self.nvme.path_of(slot) if tier is Tier.NVME and self.nvme else "host memory"
            for tier, slot in self.store.survey.quarantined_slots()
        )
        if not places:
            return []
        where = ", ".join(f"{count} of {place}" for place, count in sorted(places.items()))
        remedy = "check the device or the memory (kernel log); `kvtier quarantine list` names them"
        return [f"quarantine: copies that failed their checks and are misses: {where}; {remedy}"]

    def warn(self, what: str) -> None:
        self._warnings.append(what)
        log.warning("daemon.degraded", extra={"what": what})

    def uptime_s(self) -> float:
        return time.monotonic() - self.started_at

    def begin_serving(self) -> None:
        """The self-tests have passed; what they did is not counted."""
        self._counters_before = self.store.counters()
        self.metrics.is_counting = True
        if self.state is NodeState.STARTING:
            self.state = NodeState.READY

    def counters(self) -> Counters:
        """The store's totals since READY."""
        before = asdict(self._counters_before)
        return Counters(
            **{name: total - before[name] for name, total in asdict(self.store.counters()).items()}
        )

    def refuse_unless_serving(self) -> None:
        """Raises DaemonUnavailable while starting or draining."""
        if self.state is not NodeState.READY:
            raise DaemonUnavailable(
                f"the daemon is {self.state.value}",
                remedy="Compute the page; try again when the daemon is ready (health SERVING).",
            )

    def request_drain(self, within_s: float) -> None:
        """Starts the orderly end, once; the first deadline counts."""
        if not self.drain.asked.is_set():
            self.drain.deadline = time.monotonic() + within_s
            self.state = NodeState.DRAINING
            self.drain.asked.set()

    def readings(self) -> Mapping[str, Samples]:
        """Values of all metrics that are read and not counted. Any thread."""
        counters = self.counters()
        tier_bytes: dict[tuple[str, ...], float] = {}
        tier_pages: dict[tuple[str, ...], float] = {}
        for tier, counts in self.store.status().items():
            name = tier.name.lower()
            for kind in ("capacity", "granted", "free", "used", "quarantined"):
                tier_bytes[name, kind] = getattr(counts, f"{kind}_bytes")
            for state in ("filling", "sealed", "retiring", "quarantined", "pinned"):
                tier_pages[name, state] = getattr(counts, state)
        return {
            "kvtier_info": {(__version__, str(self.boot_id)): 1},
            "kvtier_ready": {(): float(self.state is NodeState.READY)},
            "kvtier_uptime_seconds": {(): self.uptime_s()},
            "kvtier_degraded": {(): len(self.warnings)},
            "kvtier_plane_active": {(plane,): 1 for plane in self.planes},
            "kvtier_rpcs_under_way": {
                ("call",): self.admission.calls,
                ("stream",): self.admission.streams,
            },
            "kvtier_bytes_under_way": {(): self.admission.bytes},
            "kvtier_lookup_keys_total": {
                ("hit",): counters.lookup_hits,
                ("miss",): counters.lookup_misses,
            },
            "kvtier_pages_total": {
                (name,): getattr(counters, name)
                for name in ("stored", "evicted", "deleted", "condemned")
            },
            "kvtier_refused_commits_total": {
                ("exists",): counters.exists,
                ("busy",): counters.busy,
                ("stale",): counters.stale_commits,
            },
            "kvtier_slabs_moved_total": {(): counters.slabs_moved},
            "kvtier_tier_bytes": tier_bytes,
            "kvtier_tier_pages": tier_pages,
            "kvtier_local_clients": {
                ("reader",): self.local.clients if self.local else 0,
                ("writer",): self.local.writers if self.local else 0,
            },
            "kvtier_local_grant_bytes": {
                ("granted",): self.store.grants.granted_bytes,
                ("quarantined",): self.store.grants.quarantined_bytes,
            },
            "kvtier_local_unlisted_total": {(): self.local.pages_unlisted if self.local else 0},
            "kvtier_device_pages": self.pools.pages(),
            "kvtier_device_bytes": self.pools.capacity_bytes(),
            "kvtier_sessions": {(): len(self.sessions)},
            "kvtier_handles": {(): self.sessions.handle_count},
            "kvtier_namespaces": {(): len(self.registry)},
            **(self.nvme.readings() if self.nvme else {name: {} for name in NVME_METRICS}),
        }

    async def flush(self, session: int) -> tuple[int, int]:
        """(pages that are durable now, pages that are not) of what the session has put since its
        last flush."""
        self.put_reports.take_in()
        held, known_lost = self.unflushed.take(session)
        pages, lost = 0, known_lost
        try:
            for scope, keys in held:
                durable = 0
                if self.nvme is not None:
                    durable = int((await self.nvme.tiering.make_durable(scope, keys)).sum())
                pages += durable
                lost += len(keys) - durable
        except BaseException:
            # Nobody hears of this one: all that it took waits for the next.
            self.unflushed.give_back(session, held, known_lost)
            raise
        return pages, lost

    def host_pages(self) -> int:
        """Pages that end with this process: sealed in host memory and nowhere else."""
        return len(self.store.survey.uncopied_rows(Tier.HOST))

    async def _recheck(self, reading: Reading, identity: Identity, key: bytes) -> bool:
        """Whether the copy is whole, read in this process."""
        if reading.ref.tier is Tier.NVME and self.nvme is not None:
            try:
                return await self.nvme.mover.is_whole(reading, identity, key)
            except TierIOError as error:
                self.nvme.devices.report(reading.ref.slot, error)
                raise
        check = partial(load, self.arena, identity, reading, key, check_payload=True)
        return await asyncio.to_thread(check) is not None

    async def _condemn(self, reading: Reading, why: Why) -> bool:
        if reading.ref.tier is Tier.NVME and self.nvme is not None:
            return await self.nvme.mover.condemn(reading, why) is MoveCode.CORRUPT
        return self.store.condemn(reading.ref, failed(why))

    def _local_put(self, put: PutReport) -> None:
        """A client has put pages by shared memory."""
        self.metrics.local_puts(put.codes, put.payload_bytes)
        try:
            self.sessions.session(put.session_id)
        except UnknownHandle:
            pass  # it has ended: nobody will ask for a flush of it
        else:
            self.unflushed.stored(put.session_id, put.scope, put.keys)
        if self.nvme is not None:
            self.nvme.tiering.stored(put.scope, put.keys)

    def _session_ended(self, session: Session[Place], why: str) -> None:
        leases = self.store.pins.end_session(session.session_id)
        self.unflushed.end(session.session_id)
        self.pools.end_session(session.session_id)
        log.info(
            "session.closed",
            extra={"session": session.session_id, "why": why, "leases": leases},
        )
