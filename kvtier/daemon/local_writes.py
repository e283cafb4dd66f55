"""Puts by shared memory: slots granted ahead, and the pages that clients have written into them.

Order for each page: the client copies and sums in one pass -> the header block is written here ->
the store makes the page findable. The payload is not read here: its sum is its maker's, and it is
verified by every get and before the page leaves host memory. A slot that is not a live grant of
this very writer is never touched.

All methods belong to the local server's thread; what has to be known on the event loop is reported
before the answer goes out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvtier.core.page import KEY_BYTES, NO_SUM, SUM_BYTES, Codec, PageMeta, PageRef, PutCode
from kvtier.core.page_columns import PageColumns, cut
from kvtier.core.store import Store
from kvtier.daemon.put_reports import PutReport
from kvtier.errors import DaemonUnavailable
from kvtier.packing.header_blocks import HeaderBlocks
from kvtier.packing.record import HEADER_BYTES, record_bytes
from kvtier.tiers.crash_points import crash_point
from kvtier.tiers.host import HostArena
from kvtier.transfer.local import frames
from kvtier.transfer.mover import Subject
from kvtier.transfer.place import Identity

__all__ = ["LocalWrites"]

_NO_PARENT = bytes(KEY_BYTES)
_TAKEN = frozenset(int(code) for code in PutCode if code.is_stored)
#: Kinds of pages whose header blocks are kept: those of the writers of the last seconds.
_BLOCKS_MAX = 64


class LocalWrites:
    """`subject_of` is Registry.subject_of, `is_serving` says whether puts are taken at all.
    `on_put` is called before a WRITE is answered, `on_answered` after it.
    """

    def __init__(
        self,
        store: Store,
        arena: HostArena,
        *,
        grant_s: float,
        subject_of: Callable[[int, int, bytes], Subject | None],
        is_serving: Callable[[], bool],
        on_put: Callable[[PutReport], None],
        on_answered: Callable[[], None],
    ) -> None:
        self._store = store
        self._arena = arena
        self._grant_s = grant_s
        self._subject_of = subject_of
        self._is_serving = is_serving
        self._on_put = on_put
        self._on_answered = on_answered
        self._blocks: dict[tuple[Identity, int, str, int, int], HeaderBlocks] = {}

    def write(self, holder: int, frame: frames.Write) -> Iterator[frames.Written]:
        """Takes back and seals, then grants: the answers, to be sent one by one as they come. Who
        does not ask for the second grants nothing. Raises DaemonUnavailable while draining,
        LimitExceeded for a number that no record holds.
        """
        if not self._is_serving():
            raise DaemonUnavailable(
                "the daemon takes no puts now: it is starting or draining",
                remedy="compute the page; try again when the daemon is ready",
            )
        if frame.returned:
            returned = np.frombuffer(frame.returned, "<u8").tolist()
            self._store.grants.give_back(holder, returned)
        pages = _columns(frame)
        codes = self._seal(holder, frame, pages)
        self._tell(frame, pages.keys, codes)
        is_seen_first = bool(codes and frame.wanted)
        try:
            if is_seen_first:
                yield self._answer(frame, codes, (), follows=1)
            granted = self._granted(holder, frame)
            yield self._answer(frame, b"" if is_seen_first else codes, granted, follows=0)
        finally:
            self._on_answered()

    def _granted(self, holder: int, frame: frames.Write) -> Sequence[PageRef]:
        if not frame.wanted or not self._is_layout(frame):
            return ()
        return self._store.grants.take(
            holder,
            record_bytes(frame.length),
            frame.wanted,
            deadline=time.monotonic() + self._grant_s,
        )

    def _answer(
        self, frame: frames.Write, codes: bytes, granted: Sequence[PageRef], *, follows: int
    ) -> frames.Written:
        return frames.Written(
            number=frame.number,
            codes=codes,
            slots=np.array([ref.slot for ref in granted], "<u8").tobytes(),
            generations=np.array([ref.generation for ref in granted], "<u8").tobytes(),
            grant_ms=int(self._grant_s * 1000),
            follows=follows,
        )

    def expire(self) -> None:
        """Takes grants out of use whose time has passed; to be called now and then."""
        self._store.grants.expire(time.monotonic())

    def ended(self, holder: int) -> bool:
        """Its connection has ended. Whether it holds slots that it may still write to."""
        return self._store.grants.end(holder) > 0

    def exited(self, holder: int) -> None:
        """Its process has ended."""
        self._store.grants.settle(holder)

    def undelivered(self, holder: int, answer: frames.Written) -> None:
        """It did not get this answer, and never will: nobody knows of the slots in it."""
        generations = np.frombuffer(answer.generations, "<u8").tolist()
        self._store.grants.give_back(holder, generations)

    def _is_layout(self, frame: frames.Write) -> bool:
        """Somebody has opened that namespace, and its pages have this length."""
        subject = self._subject_of(frame.namespace, frame.shard, _NO_PARENT)
        return subject is not None and _takes(subject, frame.length)

    def _seal(self, holder: int, frame: frames.Write, pages: PageColumns) -> bytes:
        if not len(frame):
            return b""
        generations = np.frombuffer(frame.generations, np.uint64).tolist()
        subject = self._subject_of(frame.namespace, frame.shard, _NO_PARENT)
        if subject is None or not _takes(subject, frame.length):
            # The namespace has ended; or a get of it could never read such pages, and they would
            # keep others out.
            self._store.grants.give_back(holder, generations)
            code = PutCode.STALE_GENERATION if subject is None else PutCode.REFUSED
            return bytes([code]) * len(frame)
        self._write_headers(holder, frame, generations, pages, subject.identity)
        crash_point("local.written")
        codes = self._store.grants.seal_many(
            holder, frame.namespace, frame.shard, generations, pages
        ).tobytes()
        crash_point("local.sealed")
        return codes

    def _write_headers(
        self,
        holder: int,
        frame: frames.Write,
        generations: list[int],
        pages: PageColumns,
        identity: Identity,
    ) -> None:
        arena, depths = self._arena.bytes.data, np.frombuffer(frame.depths, "<u4").tolist()
        blocks: HeaderBlocks | None = None
        written: set[int] = set()
        for at, ref in enumerate(self._store.grants.refs(holder, generations)):
            # A grant that is named twice is sealed as the first page.
            if ref is None or ref.generation in written:
                continue
            written.add(ref.generation)
            blocks = blocks or self._blocks_of(frame, identity, ref)
            begin = ref.slot * HEADER_BYTES
            arena[begin : begin + HEADER_BYTES] = blocks.of(
                key=pages.keys[at],
                parent=pages.parents[at],
                payload_sum=pages.payload_sums[at],
                depth=depths[at],
                slot=ref.slot,
                generation=ref.generation,
            )

    def _blocks_of(self, frame: frames.Write, identity: Identity, ref: PageRef) -> HeaderBlocks:
        """Of pages like those of the frame; `ref` is any slot of this boot."""
        common = identity, frame.length, frame.session, frame.ttl_ms, frame.priority
        blocks = self._blocks.get(common)
        if blocks is None:
            if len(self._blocks) >= _BLOCKS_MAX:
                self._blocks.clear()
            blocks = HeaderBlocks(identity.header(_common(frame), ref))
            self._blocks[common] = blocks
        return blocks

    def _tell(self, frame: frames.Write, keys: Sequence[bytes], codes: bytes) -> None:
        # What is not taken is put again over gRPC, and counted there.
        taken = [key for key, code in zip(keys, codes, strict=True) if code in _TAKEN]
        known = cut(frame.known, KEY_BYTES)
        if not taken and not known:
            return
        self._on_put(
            PutReport(
                session_id=frame.session_id,
                scope=(frame.namespace, frame.shard),
                keys=taken + known,
                codes={
                    PutCode.STORED: codes.count(PutCode.STORED),
                    PutCode.EXISTS: codes.count(PutCode.EXISTS) + len(known),
                },
                payload_bytes=len(taken) * frame.length,
            )
        )


def _takes(subject: Subject, length: int) -> bool:
    """Somebody has opened that shard, and its raw pages have this length."""
    return subject.layout is not None and subject.layout.raw_bytes == length


def _columns(frame: frames.Write) -> PageColumns:
    count, parents = len(frame), cut(frame.parents, KEY_BYTES)
    return PageColumns(
        keys=cut(frame.keys, KEY_BYTES),
        parents=[b"" if parent == _NO_PARENT else parent for parent in parents],
        lengths=[frame.length] * count,
        codecs=[int(Codec.RAW)] * count,
        lossy=[False] * count,
        payload_sums=cut(frame.sums, SUM_BYTES),
        origin_sums=[NO_SUM] * count,
        ttls_ms=[frame.ttl_ms] * count,
    )


def _common(frame: frames.Write) -> PageMeta:
    """What is said of every page of it; the rest is filled in for each."""
    return PageMeta(
        key=_NO_PARENT,
        length=frame.length,
        codec=Codec.RAW,
        payload_sum=NO_SUM,
        session=frame.session,
        ttl_ms=frame.ttl_ms,
        priority=frame.priority,
    )
