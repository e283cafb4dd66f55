"""One put by shared memory: copied into granted slots and summed in the same pass, then sealed.

Order for each page: known already (by the directory) or not -> copy and sum in one pass -> WRITE ->
the daemon's outcome. The sum is that of the bytes that the slot holds. Slices are sealed while the
next is copied. What the daemon does not take is left to gRPC, which finds out why.

A LocalPut belongs to one call and one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.client.buffers import address_of
from kvtier.client.local_channel import Grant, LocalChannel, Pages
from kvtier.client.local_link import LocalLink
from kvtier.client.writing import Writer
from kvtier.core.page import Codec, PageRef, PutCode, Tier
from kvtier.errors import DeadlineExceeded
from kvtier.packing.checksum import bound_blocks
from kvtier.transfer.local.frames import GRANTS_PER_FRAME_MAX, PAGES_PER_FRAME_MAX
from kvtier.transfer.local.protocol import ANSWER_KEYS_MAX, HIT
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import OpenedNamespace

__all__ = ["LocalPut"]

#: Copied between two seals: the daemon seals the one slice while the next is copied. A frame costs
#: both sides as much as twenty of its pages, so a slice is long.
_SLICE_BYTES: Final = 16 << 20
#: Frames that wait for their answer: the daemon cuts off who does not read them.
_UNANSWERED_MAX: Final = 8
#: How often a put asks for slots when it has none, before it is left to gRPC.
_ASKED_MAX: Final = 2
#: Slots that are kept for later at the least: who puts page by page asks for several at a time.
_AHEAD_MIN: Final = 8
# Found on the class, a member costs ten times as much.
_STORED: Final = PutCode.STORED
_EXISTS: Final = PutCode.EXISTS
_UNKNOWN: Final = bytes([PutCode.UNAVAILABLE])


class LocalPut:
    """`left` are the indices that are left to the daemon; all others have their outcome. Once
    `stop` is set the caller's memory is read no more after the slice that is being copied.
    """

    def __init__(
        self,
        channel: LocalChannel,
        link: LocalLink,
        writer: Writer,
        opened: OpenedNamespace,
        *,
        deadline: Deadline,
        stop: threading.Event,
    ) -> None:
        self._channel = channel
        self._view = link.view
        self._summer = link.summer
        self._writer = writer
        self._opened = opened
        self._deadline = deadline
        self._stop = stop
        self._length = writer.layout.raw_bytes
        hints = writer.options.hints
        self._pages = Pages(
            session_id=opened.session_id,
            namespace=opened.namespace_number,
            shard=writer.layout.shard.index,
            length=self._length,
            session=hints.session,
            ttl_ms=hints.ttl_ms,
            priority=hints.priority,
        )
        self._names = writer.names()
        self._is_open = np.ones(len(writer.keys), np.bool_)  # pages without an outcome
        self._under_way: dict[int, tuple[list[int], list[Grant]]] = {}  # by number of the frame
        self.left: list[int] = []
        self.stored = 0
        self.existed = 0
        self.timed_out = 0
        #: The daemon had no more slots to give.
        self.is_starved = False

    def run(self) -> None:
        """Does the put. Raises ClientClosed when the link ends meanwhile, DaemonUnavailable and
        InvalidFrame when the channel has: then what has no outcome is in `left`.
        """
        try:
            self._write(self._look())
        except DeadlineExceeded:
            late = np.flatnonzero(self._is_open).tolist()
            self._is_open[:] = False
            self._writer.fail(late, PutCode.TIMEOUT)
            self.timed_out = len(late)
        finally:
            self.left = sorted([*self.left, *np.flatnonzero(self._is_open).tolist()])

    def _look(self) -> list[int]:
        """Gives the pages that are there their outcome; the others."""
        is_there = self._are_there()
        if not is_there.any():
            return list(range(len(is_there)))
        there = np.flatnonzero(is_there).tolist()
        # They are told and answered, so that a flush that follows knows of them.
        for at in range(0, len(there), PAGES_PER_FRAME_MAX):
            self._check()
            some = there[at : at + PAGES_PER_FRAME_MAX]
            known = self._names.keys[some].tobytes()
            self._under_way[self._channel.send(self._pages, self._deadline, known=known)] = ([], [])
            self._writer.settle(some, bytes([_EXISTS]) * len(some))
            self._is_open[some] = False
            self.existed += len(some)
            while len(self._under_way) > _UNANSWERED_MAX:
                self._settle(wait=True)
        return np.flatnonzero(~is_there).tolist()

    def _are_there(self) -> NDArray[np.bool_]:
        """Which pages are in host memory as their maker made them, in a namespace that is current.

        A copy of a lower tier may be on its way out with its device: the daemon judges it.
        """
        keys, namespace, shard = self._writer.keys, self._pages.namespace, self._pages.shard
        generation, nothing = self._opened.generation, np.zeros(len(keys), np.bool_)
        if len(keys) <= ANSWER_KEYS_MAX:
            answer = self._view.answer(
                keys, namespace=namespace, shard=shard, generation=generation, is_exact=True
            )
            if answer is None:
                return nothing
            codes, tiers = (np.frombuffer(column, np.uint8) for column in answer)
            is_there: NDArray[np.bool_] = (codes == HIT) & (tiers == Tier.HOST)
            return is_there
        found = self._view.lookup(
            self._names.keys, namespace=namespace, shard=shard, with_entries=False, is_exact=True
        )
        is_there = found.hits & (found.tiers == Tier.HOST)
        if is_there.any() and not self._view.namespace_is_current(namespace, generation):
            return nothing
        return is_there

    def _write(self, todo: list[int]) -> None:
        channel = self._channel
        # Twice as many as are used, so that the next put does not wait for what this one asks for;
        # but room that others need must not be kept for later.
        ahead = max(2 * len(todo), _AHEAD_MIN) if channel.has_room_ahead(self._length) else 0
        step = min(max(1, _SLICE_BYTES // self._length), PAGES_PER_FRAME_MAX)
        at = asked = 0
        while at < len(todo):
            self._check()
            grants = channel.take(self._length, min(len(todo) - at, step))
            if grants:
                some = todo[at : at + len(grants)]
                at += len(grants)
                self._write_slice(some, grants, len(todo) - at, ahead)
                while channel.unanswered and self._settle(wait=False):
                    pass
            elif channel.unanswered:
                self._settle(wait=True)
            elif asked < _ASKED_MAX:
                asked += 1
                self._ask(len(todo) - at)
            else:
                self.is_starved = True
                break
        while self._under_way:
            self._settle(wait=True)

    def _wanted(self, left: int, ahead: int) -> int:
        """Slots to ask for, when `left` pages are still to come and `ahead` slots are of use later:
        none while half of them are there. The daemon grants many for less than one at a time.
        """
        useful = min(left + ahead, GRANTS_PER_FRAME_MAX)
        coming = self._channel.coming(self._length)
        is_enough = coming >= left and 2 * coming > useful
        return 0 if is_enough else max(0, useful - coming)

    def _ask(self, count: int) -> None:
        """Asks for slots and waits for the answer."""
        self._channel.spare(self._length)
        number = self._channel.send(self._pages, self._deadline, wanted=count)
        self._under_way[number] = ([], [])
        while number in self._under_way:
            self._settle(wait=True)

    def _write_slice(self, indices: list[int], grants: list[Grant], left: int, ahead: int) -> None:
        channel, names, is_sent = self._channel, self._names, False
        try:
            sums = self._copy(indices, grants)
            # Looked at last: when it is set, the pages may have changed under the copy.
            self._check()
            number = channel.send(
                self._pages,
                self._deadline,
                keys=names.keys[indices].tobytes(),
                parents=names.parents[indices].tobytes(),
                depths=names.depths[indices].tobytes(),
                sums=sums,
                generations=np.array([grant.generation for grant in grants], "<u8").tobytes(),
                wanted=self._wanted(left, ahead),
            )
            is_sent = True
            self._under_way[number] = (indices, grants)
        finally:
            if not is_sent:
                channel.put_back(self._length, grants)

    def _check(self) -> None:
        """Raises DeadlineExceeded."""
        self._deadline.remaining()
        if self._stop.is_set():
            raise DeadlineExceeded("the put was given up", remedy="put again")

    def _copy(self, indices: Sequence[int], grants: Sequence[Grant]) -> bytes:
        """Copies pages into their slots; the sums of what the slots hold then."""
        opened, rows, channel = self._opened, self._writer.rows, self._channel
        blocks = bound_blocks(
            self._names.keys[indices],
            fingerprint=opened.fingerprint,
            namespace_generation=opened.generation,
            shard=self._pages.shard,
            codec=Codec.RAW,
            length=self._length,
        )
        # What has no place of its own in host memory goes through a copy.
        passing: list[memoryview] = []
        sources = rows.addresses(np.array(indices))
        for at in np.flatnonzero(sources == 0).tolist():
            passing.append(rows.load(indices[at]))
            sources[at] = address_of(passing[-1])
        targets = channel.targets(grants, self._length)
        return self._summer.copy(sources, targets, self._length, blocks).tobytes()

    def _settle(self, *, wait: bool) -> bool:
        """Takes one answer, if there is one."""
        answer = self._channel.receive(self._deadline if wait else None, self._stop)
        if answer is None:
            return False
        indices, grants = self._under_way.pop(answer.number, ([], []))
        if indices:
            codes = answer.codes.ljust(len(indices), _UNKNOWN)
            boot_id, host = self._opened.boot_id, Tier.HOST
            refs = [PageRef(boot_id, host, grant.slot, grant.generation) for grant in grants]
            self.left += self._writer.settle(indices, codes, refs)
            self._is_open[indices] = False
            self.stored += codes.count(_STORED)
            self.existed += codes.count(_EXISTS)
        return True
