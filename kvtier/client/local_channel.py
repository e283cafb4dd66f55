"""One attachment for writing: slots that were granted ahead, and the frames that seal them.

A slot is taken for a copy only while its grant lasts by this side's clock, which ends before the
daemon's: it runs from when the grant was asked for. A copy may outlast the grant, and this process
may be stopped in the middle of it: the daemon gives a slot to nobody else before it was given back
or this process has ended.

One thread at a time.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.client.local_greeting import greeted
from kvtier.errors import DaemonUnavailable, DeadlineExceeded, InvalidFrame
from kvtier.packing.record import record_bytes
from kvtier.transfer.local import frames
from kvtier.transfer.local.arena_view import make_present, map_arena
from kvtier.transfer.planes.deadline import Deadline

__all__ = ["Grant", "LocalChannel", "Pages"]

_SLOT_BYTES: Final = 4096
#: What a wait for the daemon notices `stop` within.
_POLL_S: Final = 0.05
_CHUNK_BYTES: Final = 64 << 10
#: As much of the arena as the daemon grants to one client.
_AHEAD_PART: Final = 50
_NOTHING: Final = b""


class Grant(NamedTuple):
    """A slot that may be written to until `until` (time.monotonic())."""

    slot: int
    generation: int
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """What every page of a put has in common."""

    session_id: int
    namespace: int
    shard: int
    length: int
    session: str
    ttl_ms: int
    priority: int


class _Asked(NamedTuple):
    record: int
    at: float
    wanted: int


class LocalChannel:
    """Made by `attach`."""

    def __init__(self, control: socket.socket, arena: NDArray[np.uint8], boot_id: int) -> None:
        self._control = control
        self._arena = arena
        self._address = int(arena.ctypes.data)
        self.boot_id = boot_id
        self._pool: dict[int, deque[Grant]] = {}  # by record size
        self._asked: dict[int, _Asked] = {}  # by number; frames that were not answered yet
        self._numbers = 0
        self._is_present = bytearray(-(-len(arena) // _CHUNK_BYTES))  # 1 of each chunk that is
        self._late: list[int] = []  # generations of grants whose time has passed
        #: A wait for an answer was given up, and it has not come since.
        self.is_silent = False

    @classmethod
    def attach(cls, path: str, deadline: Deadline, *, boot_id: int, client_name: str) -> Self:
        """Raises DaemonUnavailable, DeadlineExceeded, DirectoryError, InvalidFrame, and what the
        daemon refuses it with.
        """
        within_s = deadline.remaining()
        with greeted(
            path, boot_id=boot_id, client_name=client_name, writes=True, within_s=within_s
        ) as welcomed:
            arena = map_arena(welcomed.fds[0], welcomed.arena_bytes, writable=True)
            return cls(welcomed.keep(), arena, boot_id)

    @property
    def unanswered(self) -> int:
        """Frames that the daemon has not answered yet."""
        return len(self._asked)

    def coming(self, length: int) -> int:
        """Slots for payloads of `length` bytes that are here or were asked for."""
        record = record_bytes(length)
        asked = sum(a.wanted for a in self._asked.values() if a.record == record)
        return len(self._pool.get(record, ())) + asked

    def has_room_ahead(self, length: int) -> bool:
        """Whether slots for payloads of `length` bytes are small enough, beside the arena, to be
        kept for later: else making room for them evicts what was put just now.
        """
        return record_bytes(length) <= len(self._arena) // _AHEAD_PART

    @property
    def holds(self) -> bool:
        """It has slots that it does not use."""
        return bool(self._late) or any(self._pool.values())

    def _clear_rest(self, grant: Grant, length: int) -> None:
        """Zeroes what follows a payload in its slot: it is of an earlier page, and would go to NVMe
        with this one.
        """
        begin = (grant.slot + 1) * _SLOT_BYTES + length
        end = grant.slot * _SLOT_BYTES + record_bytes(length)
        if begin < end:
            self._arena[begin:end] = 0

    def targets(self, grants: Sequence[Grant], length: int) -> NDArray[np.int64]:
        """Where payloads of `length` bytes go, shape (n,); what follows them there is cleared."""
        if length % _SLOT_BYTES:
            for grant in grants:
                self._clear_rest(grant, length)
        begin = self._address + _SLOT_BYTES
        return np.array([begin + grant.slot * _SLOT_BYTES for grant in grants], np.int64)

    def take(self, length: int, most: int) -> list[Grant]:
        """Slots for payloads of `length` bytes, as many as there are."""
        record = record_bytes(length)
        pool = self._pool.get(record)
        taken: list[Grant] = []
        now = time.monotonic()
        while pool and len(taken) < most:
            grant = pool.popleft()
            if grant.until > now:
                self._make_present(grant.slot * _SLOT_BYTES, record)
                taken.append(grant)
            else:
                self._late.append(grant.generation)
        return taken

    def _make_present(self, begin: int, nbytes: int) -> None:
        first, after = begin // _CHUNK_BYTES, -(-(begin + nbytes) // _CHUNK_BYTES)
        if self._is_present.find(0, first, after) >= 0:
            begin = first * _CHUNK_BYTES
            end = min(after * _CHUNK_BYTES, len(self._arena))
            make_present(self._arena, begin, end - begin)
            self._is_present[first:after] = bytes([1]) * (after - first)

    def spare(self, length: int) -> None:
        """Slots for payloads of another length are given back with the next frame."""
        for record, pool in self._pool.items():
            if record != record_bytes(length):
                self._late += [grant.generation for grant in pool]
                pool.clear()

    def put_back(self, length: int, grants: list[Grant]) -> None:
        """Slots that were taken and not sealed; nobody writes to them any more."""
        self._pool.setdefault(record_bytes(length), deque()).extendleft(grants)

    def send(
        self,
        pages: Pages,
        deadline: Deadline,
        *,
        keys: bytes = _NOTHING,
        parents: bytes = _NOTHING,
        depths: bytes = _NOTHING,
        sums: bytes = _NOTHING,
        generations: bytes = _NOTHING,
        known: bytes = _NOTHING,
        wanted: int = 0,
    ) -> int:
        """Sends a WRITE; its number. Raises DaemonUnavailable, DeadlineExceeded."""
        self._numbers += 1
        returned = self._late[: frames.GRANTS_PER_FRAME_MAX]
        wanted = min(wanted, frames.GRANTS_PER_FRAME_MAX)
        frame = frames.Write(
            number=self._numbers,
            session_id=pages.session_id,
            namespace=pages.namespace,
            shard=pages.shard,
            length=pages.length,
            keys=keys,
            parents=parents,
            depths=depths,
            sums=sums,
            generations=generations,
            session=pages.session,
            ttl_ms=pages.ttl_ms,
            priority=pages.priority,
            known=known,
            returned=_packed(returned),
            wanted=wanted,
        )
        self._control.settimeout(deadline.remaining())
        at = time.monotonic()
        try:
            self._control.send(frames.encode(frame))
        except TimeoutError:
            raise _silent() from None
        except OSError as error:
            raise _gone(str(error)) from error
        del self._late[: len(returned)]
        self._asked[frame.number] = _Asked(record_bytes(pages.length), at, wanted)
        return frame.number

    def receive(
        self, deadline: Deadline | None, stop: threading.Event | None = None
    ) -> frames.Written | None:
        """The next answer, its grants taken in; without a deadline only one that is here already.

        Raises DaemonUnavailable, InvalidFrame, and DeadlineExceeded also when `stop` is set.
        """
        while True:
            left = 0.0 if deadline is None else max(0.0, deadline.at - time.monotonic())
            self._control.settimeout(min(left, _POLL_S))
            try:
                packet = self._control.recv(frames.FRAME_BYTES_MAX)
            except (BlockingIOError, TimeoutError):
                if deadline is None:
                    return None
                if deadline.has_passed or (stop is not None and stop.is_set()):
                    self.is_silent = True
                    raise _silent() from None
                continue
            except OSError as error:
                raise _gone(str(error)) from error
            return self._taken_in(packet)

    def _taken_in(self, packet: bytes) -> frames.Written:
        if not packet:
            raise _gone("the daemon has closed its control socket")
        frame = frames.decode(packet)
        if isinstance(frame, frames.Refused):
            raise _gone(frame.message)
        asked = self._asked.get(frame.number) if isinstance(frame, frames.Written) else None
        if not isinstance(frame, frames.Written) or asked is None:
            raise InvalidFrame(
                f"a {type(frame).__name__} that nobody asked for",
                remedy="use a client and daemon of the same version",
            )
        if not frame.follows:
            del self._asked[frame.number]
            self.is_silent = self.is_silent and bool(self._asked)
        until = asked.at + frame.grant_ms / 1000
        slots = np.frombuffer(frame.slots, "<u8").tolist()
        generations = np.frombuffer(frame.generations, "<u8").tolist()
        pool = self._pool.setdefault(asked.record, deque())
        most = len(self._arena) - asked.record
        for slot, generation in zip(slots, generations, strict=True):
            if slot * _SLOT_BYTES > most:
                raise InvalidFrame(
                    f"slot {slot} lies behind the arena",
                    remedy="use a client and daemon of the same version",
                )
            pool.append(Grant(slot, generation, until))
        return frame

    def give_back(self, deadline: Deadline | None = None) -> bool:
        """Gives back what is not used; whether something is left. Waits for the daemon only with a
        deadline. Raises as `receive`.
        """
        while self.unanswered and self.receive(deadline) is not None:
            pass
        for pool in self._pool.values():
            self._late += [grant.generation for grant in pool]
            pool.clear()
        while self._late:
            self.send(_NO_PAGES, deadline or Deadline.after(_POLL_S))
        while self.unanswered and self.receive(deadline) is not None:
            pass
        return bool(self.unanswered) or self.holds

    def close(self) -> None:
        """Gives back what it can, and lets go. Waits a moment for answers that grant more: slots in
        one that is not read stay out of use until this process ends.
        """
        try:
            for deadline in (Deadline.after(_POLL_S), None):
                with suppress(DeadlineExceeded):
                    if not self.give_back(deadline):
                        break
        except (DaemonUnavailable, InvalidFrame):
            pass  # the daemon has it back when this process ends
        finally:
            self._control.close()


_NO_PAGES: Final = Pages(
    session_id=0, namespace=0, shard=0, length=0, session="", ttl_ms=0, priority=0
)


def _packed(generations: list[int]) -> bytes:
    return np.array(generations, "<u8").tobytes()


def _gone(why: str) -> DaemonUnavailable:
    return DaemonUnavailable(why, remedy="the put goes over gRPC; see the daemon's log")


def _silent() -> DeadlineExceeded:
    return DeadlineExceeded(
        "the daemon did not answer on its control socket",
        remedy="put again; raise `deadline` if this happens often",
    )
