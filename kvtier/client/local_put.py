"""One put by shared memory: copied into granted slots and summed in the same pass, then sealed.

Order for each page: known already (by the directory) or not -> copy and sum in one pass -> WRITE ->
the daemon's outcome. The sum is that of the bytes that the slot holds. Slices are sealed while the
next is copied. What the daemon does not take is left to gRPC, which finds out why.

A LocalPut belongs to one call and one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvtier.client.buffers import address_of
from kvtier.client.local_writer import Grant, LocalWriter, Pages
from kvtier.client.writing import Writer
from kvtier.core.page import KEY_BYTES, Codec, PageRef, PutCode, Tier
from kvtier.errors import DeadlineExceeded
from kvtier.packing.bulk_sums import Summer
from kvtier.packing.checksum import bound_blocks
from kvtier.transfer.local.frames import GRANTS_PER_FRAME_MAX, PAGES_PER_FRAME_MAX
from kvtier.transfer.local.lookup import DirectoryView
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import OpenedNamespace

__all__ = ["LocalPut"]

#: Copied between two seals: the daemon seals the one slice while the next is copied.
_SLICE_BYTES: Final = 4 << 20
_NO_PARENT: Final = bytes(KEY_BYTES)


class LocalPut:
    """`left` are the indices that are left to the daemon; all others have their outcome."""

    def __init__(
        self,
        channel: LocalWriter,
        view: DirectoryView,
        summer: Summer,
        writer: Writer,
        opened: OpenedNamespace,
        deadline: Deadline,
    ) -> None:
        self._channel = channel
        self._view = view
        self._summer = summer
        self._writer = writer
        self._opened = opened
        self._deadline = deadline
        self._under_way: dict[int, tuple[list[int], list[Grant]]] = {}
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
        self._unsent: list[int] = []
        self.left: list[int] = []
        self.stored = 0
        self.existed = 0

    def run(self) -> None:
        """Does the put. Raises ClientClosed when the link ends meanwhile, DaemonUnavailable and
        InvalidFrame when the writer has: then what has no outcome is in `left`.
        """
        unseen = deque(range(len(self._writer.keys)))
        try:
            self._look(unseen)
            self._write(unseen)
        except DeadlineExceeded:
            self._writer.fail([*self._without_answer(), *unseen], PutCode.TIMEOUT)
            unseen.clear()
        except BaseException:
            self.left += [*self._without_answer(), *unseen]
            raise
        self.left += unseen

    def _without_answer(self) -> list[int]:
        return self._unsent + [
            index for indices, _ in self._under_way.values() for index in indices
        ]

    def _look(self, unseen: deque[int]) -> None:
        """Gives the pages that are there their outcome, and takes them out of `unseen`."""
        keys, namespace = self._writer.keys, self._pages.namespace
        found = self._view.lookup(keys, namespace=namespace, shard=self._pages.shard)
        is_there = found.hits & (found.lossy == np.uint64(0))
        if not is_there.any():
            return
        if not self._view.namespace_is_current(namespace, self._opened.generation):
            return
        there = np.flatnonzero(is_there).tolist()
        for at in range(0, len(there), PAGES_PER_FRAME_MAX):
            known = b"".join(keys[index] for index in there[at : at + PAGES_PER_FRAME_MAX])
            number = self._channel.send(self._pages, self._deadline, known=known)
            self._under_way[number] = ([], [])
        for index in there:
            self._writer.settle(index, PutCode.EXISTS, None)
        self.existed += len(there)
        unseen.clear()
        unseen.extend(np.flatnonzero(~is_there).tolist())

    def _write(self, todo: deque[int]) -> None:
        # Twice as many as are used, so that the next put does not wait for what this one asks for.
        channel, ahead = self._channel, 2 * len(todo)
        step = min(max(1, _SLICE_BYTES // self._length), PAGES_PER_FRAME_MAX)
        while todo:
            self._deadline.remaining()
            grants = channel.take(self._length, min(len(todo), step))
            if grants:
                self._write_slice([todo.popleft() for _ in grants], grants, len(todo) + ahead)
                while channel.unanswered and self._settle(wait=False):
                    pass
            elif channel.unanswered:
                self._settle(wait=True)
            elif not self._ask(len(todo)):
                return  # the daemon has none to give
        while self._under_way:
            self._settle(wait=True)

    def _ask(self, count: int) -> bool:
        """Asks for slots and waits for the answer; whether there are some."""
        number = self._channel.send(self._pages, self._deadline, wanted=count)
        self._under_way[number] = ([], [])
        while number in self._under_way:
            self._settle(wait=True)
        return self._channel.coming(self._length) > 0

    def _write_slice(self, indices: list[int], grants: list[Grant], useful: int) -> None:
        channel, is_sent = self._channel, False
        try:
            sums = self._copy(indices, grants)
            keys, parents, depths = self._names(indices)
            number = channel.send(
                self._pages,
                self._deadline,
                keys=keys,
                parents=parents,
                depths=depths,
                sums=sums,
                generations=np.array([grant.generation for grant in grants], "<u8").tobytes(),
                wanted=max(0, min(useful, GRANTS_PER_FRAME_MAX) - channel.coming(self._length)),
            )
            is_sent = True
            self._under_way[number] = (indices, grants)
        finally:
            if not is_sent:
                channel.put_back(self._length, grants)
                self._unsent = indices

    def _copy(self, indices: Sequence[int], grants: Sequence[Grant]) -> bytes:
        """Copies pages into their slots; the sums of what the slots hold then."""
        opened, rows, channel = self._opened, self._writer.rows, self._channel
        blocks = bound_blocks(
            [self._writer.keys[index] for index in indices],
            fingerprint=opened.fingerprint,
            namespace_generation=opened.generation,
            shard=self._pages.shard,
            codec=Codec.RAW,
            length=self._length,
        )
        # What has no place of its own in host memory goes through a copy.
        passing: list[memoryview] = []
        sources, targets = np.empty(len(indices), np.int64), np.empty(len(indices), np.int64)
        for at, (index, grant) in enumerate(zip(indices, grants, strict=True)):
            address = rows.address(index)
            if address is None:
                passing.append(rows.load(index))
                address = address_of(passing[-1])
            sources[at] = address
            targets[at] = channel.payload_address(grant)
            channel.clear_rest(grant, self._length)
        return self._summer.copy(sources, targets, self._length, blocks).tobytes()

    def _names(self, indices: Sequence[int]) -> tuple[bytes, bytes, bytes]:
        """Keys, parents and depths as a WRITE has them."""
        writer = self._writer
        parents = [writer.parent_of(index) or _NO_PARENT for index in indices]
        depths = np.array([writer.depth_of(index) for index in indices], "<u4")
        keys = [writer.keys[index] for index in indices]
        return b"".join(keys), b"".join(parents), depths.tobytes()

    def _settle(self, *, wait: bool) -> bool:
        """Takes one answer, if there is one."""
        answer = self._channel.receive(self._deadline if wait else None)
        if answer is None:
            return False
        indices, grants = self._under_way.pop(answer.number, ([], []))
        codes = answer.codes.ljust(len(indices), bytes([PutCode.UNAVAILABLE]))
        for index, grant, code in zip(indices, grants, codes, strict=True):
            if code == PutCode.STORED:
                ref = PageRef(self._opened.boot_id, Tier.HOST, grant.slot, grant.generation)
                self._writer.settle(index, PutCode.STORED, ref)
                self.stored += 1
            elif code == PutCode.EXISTS:
                self._writer.settle(index, PutCode.EXISTS, None)
                self.existed += 1
            else:
                self.left.append(index)
        return True
