"""The tier below host memory as the mover sees it, and what a movement is about and comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from kvtier.core.page import PutCode
from kvtier.errors import TierIOError
from kvtier.packing.layout import Layout
from kvtier.tiers.base import TierDevice
from kvtier.tiers.io_pool import IoClass, IoJob
from kvtier.transfer.place import Identity

__all__ = ["Lower", "MoveCode", "Subject"]

T = TypeVar("T")


class MoveCode(Enum):
    """The one outcome of a movement."""

    DONE = "done"  # the copy is there, made now or before
    BUSY = "busy"  # no room that may be taken now, or too much under way
    GONE = "gone"  # deleted, bumped, evicted or condemned meanwhile
    CORRUPT = "corrupt"
    IO_ERROR = "io_error"
    TIMEOUT = "timeout"
    REFUSED = "refused"  # the page cannot be in that tier: too long, or not to be packed

    @classmethod
    def of_refusal(cls, code: PutCode) -> MoveCode:
        """What a reservation that was refused comes to."""
        if code is PutCode.EXISTS:
            return cls.DONE
        return cls.GONE if code is PutCode.STALE_GENERATION else cls.BUSY


class Lower(Protocol):
    """The NVMe tier as the mover sees it."""

    @property
    def tier(self) -> TierDevice: ...
    @property
    def segment_bytes(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...

    def submit(self, io_class: IoClass, slot: int, work: Callable[[], T]) -> IoJob[T]:
        """Runs `work` on a thread of the slot's device. Raises Busy."""

    def serves(self, slot: int) -> bool:
        """Whether the slot's device is online; else its pages are on their way out of the books."""

    def report(self, slot: int, error: TierIOError | TimeoutError | None) -> None:
        """How an access of the slot's device went."""

    async def grow(self, record_bytes: int) -> None:
        """Makes room for a record without anything giving way, if the tier still may grow."""

    async def prepare(self, slot: int, record_bytes: int) -> None:
        """Must return before a record is written there. Raises DirectoryError."""

    async def forget(self, generation: int) -> None:
        """That record must not come back with a restart. Raises DirectoryError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Which page: as the index names it, and what its record must say."""

    namespace: int
    key: bytes
    identity: Identity
    layout: Layout | None  # None: not known in this boot, so the page cannot be packed

    @property
    def shard(self) -> int:
        return self.identity.shard

    @property
    def name(self) -> tuple[int, int, bytes]:
        return self.namespace, self.shard, self.key
