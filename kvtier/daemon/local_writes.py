"""Puts by shared memory: slots granted ahead, and the pages that clients have written into them.

Order for each page: the client copies and sums in one pass -> the header block is written here ->
the store makes the page findable. The payload is not read here: its sum is its maker's, and it is
verified by every get and before the page leaves host memory. A slot that is not a live grant of
this very writer is never touched.

All methods belong to the local server's thread; what has to be known on
the event loop is told to it before the answer goes out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.core.page import KEY_BYTES, NO_SUM, SUM_BYTES, Codec, PageMeta, PageRef, PutCode
from kvtier.core.store import Store
from kvtier.errors import DaemonUnavailable
from kvtier.packing.record import HEADER_BYTES, encode_header, record_bytes
from kvtier.tiers.crash_points import crash_point
from kvtier.tiers.host import HostArena
from kvtier.transfer.local import frames
from kvtier.transfer.mover import Subject

__all__ = ["PutReport", "LocalWrites"]

_NO_PARENT = bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutReport:
    """What one WRITE came to, for those who keep count on the event loop."""

    session_id: int
    scope: tuple[int, int]  # namespace number and shard
    #: Of the pages that are in the cache now: those stored, and those that were there.
    keys: tuple[bytes, ...]
    codes: Counter[PutCode]
    payload_bytes: int


class LocalWrites:
    """`subject_of` is Registry.subject_of, `is_serving` says whether puts are taken at all."""

    def __init__(
        self,
        store: Store,
        arena: HostArena,
        *,
        grant_s: float,
        subject_of: Callable[[int, int, bytes], Subject | None],
        is_serving: Callable[[], bool],
        on_put: Callable[[PutReport], None],
    ) -> None:
        self._store = store
        self._arena = arena
        self._grant_s = grant_s
        self._subject_of = subject_of
        self._is_serving = is_serving
        self._on_put = on_put

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
        metas = _metas(frame)
        codes = self._seal(holder, frame, metas)
        self._tell(frame, metas, codes)
        is_seen_first = bool(codes and frame.wanted)
        if is_seen_first:
            yield self._answer(frame, codes, (), follows=1)
        granted = self._granted(holder, frame)
        yield self._answer(frame, b"" if is_seen_first else codes, granted, follows=0)

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

    def _seal(self, holder: int, frame: frames.Write, metas: Sequence[PageMeta]) -> bytes:
        if not metas:
            return b""
        generations = np.frombuffer(frame.generations, np.uint64).tolist()
        subject = self._subject_of(frame.namespace, frame.shard, _NO_PARENT)
        if subject is None or not _takes(subject, frame.length):
            # The namespace has ended; or a get of it could never read such pages, and they would
            # keep others out.
            self._store.grants.give_back(holder, generations)
            code = PutCode.STALE_GENERATION if subject is None else PutCode.REFUSED
            return bytes([code]) * len(metas)
        refs = self._store.grants.refs(holder, generations)
        written: set[int] = set()
        for ref, meta in zip(refs, metas, strict=True):
            # A grant that is named twice is sealed as the first page.
            if ref is not None and ref.generation not in written:
                written.add(ref.generation)
                header = subject.identity.header(meta, ref)
                self._arena.view(ref.slot, 0, HEADER_BYTES)[:] = encode_header(header)
        crash_point("local.written")
        codes = self._store.grants.seal_many(
            holder, frame.namespace, frame.shard, generations, metas
        ).tobytes()
        crash_point("local.sealed")
        return codes

    def _tell(self, frame: frames.Write, metas: Sequence[PageMeta], codes: bytes) -> None:
        # What is not taken is put again over gRPC, and counted there.
        known = _cut(frame.known, KEY_BYTES)
        taken = {
            meta.key: code
            for meta, code in zip(metas, map(PutCode, codes), strict=True)
            if code.is_stored
        }
        if not taken and not known:
            return
        counts = Counter(taken.values())
        counts[PutCode.EXISTS] += len(known)
        self._on_put(
            PutReport(
                session_id=frame.session_id,
                scope=(frame.namespace, frame.shard),
                keys=(*taken, *known),
                codes=counts,
                payload_bytes=len(taken) * frame.length,
            )
        )


def _takes(subject: Subject, length: int) -> bool:
    """Somebody has opened that shard, and its raw pages have this length."""
    return subject.layout is not None and subject.layout.raw_bytes == length


def _metas(frame: frames.Write) -> list[PageMeta]:
    depths = np.frombuffer(frame.depths, "<u4").tolist()
    columns = zip(
        _cut(frame.keys, KEY_BYTES),
        _cut(frame.parents, KEY_BYTES),
        _cut(frame.sums, SUM_BYTES),
        depths,
        strict=True,
    )
    return [
        PageMeta(
            key=key,
            length=frame.length,
            codec=Codec.RAW,
            payload_sum=payload_sum,
            origin_sum=NO_SUM,
            parent=b"" if parent == _NO_PARENT else parent,
            depth=depth,
            session=frame.session,
            ttl_ms=frame.ttl_ms,
            priority=frame.priority,
        )
        for key, parent, payload_sum, depth in columns
    ]


def _cut(column: bytes, width: int) -> list[bytes]:
    return [column[at : at + width] for at in range(0, len(column), width)]
