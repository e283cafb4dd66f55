"""A tier that fails on purpose: any TierDevice inside, the faults of a real one outside.

Promise: a fault happens at the call it was planned for, or with its probability from the seed, and
every one that happened is in `injected`, so a test can tell "survived the fault" from "the fault
never came". Between faults the device inside is used unchanged. Faults do to bytes only what
hardware does: nothing outside the call's own range.

    kind             read                         write
    EIO              raises, nothing moved        raises, nothing written
    ENOSPC, EDQUOT   -                            raises, nothing written
    SHORT            a seeded prefix, raises      a seeded prefix, raises
    TORN             -                            a seeded prefix, returns as if all were written
    SLOW             sleeps `delay_s` first       the same
    HANG             waits for `release()`        the same
    FLIP             one bit of what is returned  one bit of what comes to rest
    DUPLICATE        -                            written, and written again at `land()`
    LATE             -                            raises ETIMEDOUT; written at `land()`
    POWER_CUT        `power_cut()`, raises        the same, before anything is written

SLOW and HANG go with any other fault; of the others the first planned that hits a call decides.
A sync knows EIO, ENOSPC, EDQUOT, SLOW, HANG and POWER_CUT, and covers nothing when it raises.

Thread rule: any thread; plans and records are under one lock, the device inside is called outside
of it.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvtier.core.page import Tier
from kvtier.errors import TierIOError
from kvtier.testing.unsynced import UnsyncedWrites
from kvtier.tiers.base import Buffer, TierDevice, TierOperation, flat_bytes, tier_io_error

__all__ = ["Fault", "FaultKind", "FaultyTier", "Injection"]

READ, WRITE, SYNC = TierOperation.READ, TierOperation.WRITE, TierOperation.SYNC


class FaultKind(Enum):
    EIO = auto()
    ENOSPC = auto()
    EDQUOT = auto()
    SHORT = auto()
    TORN = auto()
    SLOW = auto()
    HANG = auto()
    FLIP = auto()
    DUPLICATE = auto()
    LATE = auto()
    POWER_CUT = auto()


_NEVER_ON = {
    READ: {FaultKind.ENOSPC, FaultKind.EDQUOT, FaultKind.TORN, FaultKind.DUPLICATE, FaultKind.LATE},
    WRITE: set(),
    SYNC: {FaultKind.SHORT, FaultKind.TORN, FaultKind.FLIP, FaultKind.DUPLICATE, FaultKind.LATE},
}
#: These only take time; one of the others may follow in the same call.
_STALLS = {FaultKind.SLOW, FaultKind.HANG}
_ERRNO = {
    FaultKind.EIO: errno.EIO,
    FaultKind.ENOSPC: errno.ENOSPC,
    FaultKind.EDQUOT: errno.EDQUOT,
    FaultKind.SHORT: errno.EIO,
    FaultKind.LATE: errno.ETIMEDOUT,
    FaultKind.POWER_CUT: errno.EIO,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A plan: `kind` at the `nth` call of `operation` (from 1), or at any with `probability`.

    `times_max` ends a plan by probability. `delay_s` is for SLOW.
    """

    kind: FaultKind
    operation: TierOperation = WRITE
    nth: int = 0
    probability: float = 0.0
    times_max: int = 1_000_000
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if (self.nth > 0) == (self.probability > 0):
            raise ValueError(f"a fault has either nth or probability: {self}")
        if self.kind in _NEVER_ON[self.operation]:
            raise ValueError(f"{self.kind.name} does not happen to a {self.operation}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A fault that happened: at which call, to which range; `detail` is bytes moved or the bit."""

    kind: FaultKind
    operation: TierOperation
    call: int
    slot: int
    offset: int
    length: int
    detail: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    operation: TierOperation
    number: int
    slot: int = -1
    offset: int = 0
    length: int = 0


class FaultyTier:
    """A TierDevice around `inner`. `sleep` is the clock seam for SLOW (`SimClock.sleep`).

    `keeps_unsynced` makes `power_cut` possible; it costs memory for every write since the last
    sync.
    """

    #: A HANG that nobody releases raises ETIMEDOUT after this much real time: the test fails, not
    #: hangs.
    hang_max_s = 30.0

    def __init__(
        self,
        inner: TierDevice,
        faults: Sequence[Fault] = (),
        *,
        seed: int,
        sleep: Callable[[float], None] = time.sleep,
        keeps_unsynced: bool = False,
    ) -> None:
        self.inner = inner
        self.seed = seed
        self.injected: list[Injection] = []
        self.calls = dict.fromkeys((READ, WRITE, SYNC), 0)
        self._faults = list(faults)
        self._drawn = [0] * len(self._faults)
        self._random = random.Random(seed)
        self._sleep = sleep
        self._released = threading.Event()
        self._hanging = 0
        self._lock = threading.Lock()
        self._delayed: list[tuple[int, bytes, int]] = []
        self._unsynced = UnsyncedWrites(inner) if keeps_unsynced else None
        self._is_off = False

    @property
    def tier(self) -> Tier:
        return self.inner.tier

    @property
    def capacity_bytes(self) -> int:
        return self.inner.capacity_bytes

    def write(self, slot: int, parts: Sequence[Buffer], offset: int = 0) -> None:
        """See TierDevice, and the table above."""
        data = b"".join(flat_bytes(part) for part in parts)
        call, kinds = self._begin(WRITE, slot, offset, len(data))
        self._stall(call, kinds)
        if FaultKind.LATE in kinds or FaultKind.DUPLICATE in kinds:
            with self._lock:
                self._delayed.append((slot, data, offset))
        self._raise_if_failing(call, kinds)
        if FaultKind.FLIP in kinds and data:
            data = self._flipped(call, data)
        if FaultKind.SHORT in kinds or FaultKind.TORN in kinds:
            kind = FaultKind.SHORT if FaultKind.SHORT in kinds else FaultKind.TORN
            count = self._prefix_bytes(call, kind)
            self._put(slot, data[:count], offset)
            if kind is FaultKind.SHORT:
                raise self._failure(call, kind, f"short write of {count} of {len(data)} bytes")
            return
        self._put(slot, data, offset)
        if FaultKind.DUPLICATE in kinds:
            self._record(call, FaultKind.DUPLICATE)

    def read(self, slot: int, offset: int, into: Buffer) -> None:
        """See TierDevice, and the table above."""
        target = flat_bytes(into)
        call, kinds = self._begin(READ, slot, offset, target.nbytes)
        self._stall(call, kinds)
        self._raise_if_failing(call, kinds)
        if FaultKind.SHORT in kinds:
            count = self._prefix_bytes(call, FaultKind.SHORT)
            self.inner.read(slot, offset, target[:count])
            words = f"short read of {count} of {target.nbytes} bytes"
            raise self._failure(call, FaultKind.SHORT, words)
        self.inner.read(slot, offset, target)
        if FaultKind.FLIP in kinds and target:
            target[:] = self._flipped(call, bytes(target))

    def sync(self) -> None:
        """See TierDevice; what was written before is safe from `power_cut` then."""
        call, kinds = self._begin(SYNC, -1, 0, 0)
        self._stall(call, kinds)
        self._raise_if_failing(call, kinds)
        self.inner.sync()
        if self._unsynced is not None:
            self._unsynced.forget()

    def close(self) -> None:
        self._released.set()
        self.inner.close()

    # What a test does to it, apart from the plan.

    @property
    def hanging(self) -> int:
        """How many calls wait for `release` now."""
        return self._hanging

    def release(self) -> None:
        """Let all hanging calls go on, and later ones not hang."""
        self._released.set()

    def land(self) -> int:
        """The delayed writes (LATE, DUPLICATE) reach the device now. Returns how many."""
        with self._lock:
            delayed, self._delayed = self._delayed, []
        for slot, data, offset in delayed:
            self._put(slot, data, offset)
        return len(delayed)

    def flip_at_rest(self, slot: int, offset: int, length: int) -> int:
        """Flip one seeded bit of what lies in the range. Returns which, from the range's start."""
        with self._lock:
            bit = self._random.randrange(length * 8)
        cell = bytearray(1)
        self.inner.read(slot, offset + bit // 8, cell)
        cell[0] ^= 1 << bit % 8
        self.inner.write(slot, [cell], offset + bit // 8)
        call = _Call(operation=WRITE, number=0, slot=slot, offset=offset, length=length)
        self._record(call, FaultKind.FLIP, bit)
        return bit

    def power_cut(self, *, survival: float = 0.0) -> int:
        """Lose writes that no `sync` covered, then fail every call with EIO until `power_on`.

        Each 4 KiB block of each such write survives with probability `survival`, so writes tear and
        reorder as on a real disk. Returns how many blocks were lost.
        """
        if self._unsynced is None:
            raise ValueError("a FaultyTier without keeps_unsynced does not know what to lose")
        with self._lock:
            self._is_off = True
            lost = self._unsynced.lose(survival, self._random)
            self._delayed.clear()
        self._record(_Call(operation=WRITE, number=0), FaultKind.POWER_CUT, lost)
        return lost

    def power_on(self) -> None:
        self._is_off = False

    def count(self, kind: FaultKind) -> int:
        """How often `kind` happened."""
        with self._lock:
            return sum(injection.kind is kind for injection in self.injected)

    def _begin(
        self, operation: TierOperation, slot: int, offset: int, length: int
    ) -> tuple[_Call, dict[FaultKind, Fault]]:
        """Number the call and draw the faults that hit it."""
        with self._lock:
            self.calls[operation] += 1
            number = self.calls[operation]
            hits = self._drawn_for(operation, number)
        call = _Call(operation=operation, number=number, slot=slot, offset=offset, length=length)
        if self._is_off:
            raise self._failure(call, None, "the power is off")
        return call, hits

    def _drawn_for(self, operation: TierOperation, number: int) -> dict[FaultKind, Fault]:
        """Which plans hit this call: every stall, and the first of the others."""
        hits: dict[FaultKind, Fault] = {}
        has_outcome = False
        for plan, fault in enumerate(self._faults):
            if fault.operation is not operation:
                continue
            # Drawn for every plan and call, so that one plan's luck does not move another's.
            is_drawn = self._random.random() < fault.probability
            is_hit = number == fault.nth or (is_drawn and self._drawn[plan] < fault.times_max)
            is_stall = fault.kind in _STALLS
            if is_hit and (is_stall or not has_outcome):
                hits[fault.kind] = fault
                self._drawn[plan] += 1
                has_outcome |= not is_stall
        return hits

    def _stall(self, call: _Call, kinds: dict[FaultKind, Fault]) -> None:
        slow = kinds.get(FaultKind.SLOW)
        if slow is not None:
            self._record(call, FaultKind.SLOW)
            self._sleep(slow.delay_s)
        if FaultKind.HANG in kinds:
            self._record(call, FaultKind.HANG)
            with self._lock:
                self._hanging += 1
            is_released = self._released.wait(self.hang_max_s)
            with self._lock:
                self._hanging -= 1
            if not is_released:
                cause = OSError(errno.ETIMEDOUT, f"nobody released it in {self.hang_max_s} s")
                raise tier_io_error(self.tier, call.operation, cause, slot=call.slot)

    def _raise_if_failing(self, call: _Call, kinds: dict[FaultKind, Fault]) -> None:
        if FaultKind.POWER_CUT in kinds:
            self.power_cut()
            raise self._failure(call, None, "the power is off")
        for kind in (FaultKind.EIO, FaultKind.ENOSPC, FaultKind.EDQUOT, FaultKind.LATE):
            if kind in kinds:
                self._record(call, kind)
                raise self._failure(call, kind)

    def _failure(self, call: _Call, kind: FaultKind | None, words: str = "") -> TierIOError:
        number = _ERRNO[kind] if kind is not None else errno.EIO
        cause = OSError(number, words) if words else OSError(number, f"injected {kind}")
        return tier_io_error(self.tier, call.operation, cause, slot=call.slot)

    def _prefix_bytes(self, call: _Call, kind: FaultKind) -> int:
        with self._lock:
            count = self._random.randrange(max(1, call.length))
        self._record(call, kind, count)
        return count

    def _flipped(self, call: _Call, data: bytes) -> bytes:
        with self._lock:
            bit = self._random.randrange(len(data) * 8)
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        self._record(call, FaultKind.FLIP, bit)
        return bytes(flipped)

    def _put(self, slot: int, data: bytes, offset: int) -> None:
        if self._unsynced is not None:
            self._unsynced.write(slot, data, offset)
        else:
            self.inner.write(slot, [data], offset)

    def _record(self, call: _Call, kind: FaultKind, detail: int = 0) -> None:
        injection = Injection(
            kind=kind,
            operation=call.operation,
            call=call.number,
            slot=call.slot,
            offset=call.offset,
            length=call.length,
            detail=detail,
        )
        with self._lock:
            self.injected.append(injection)
