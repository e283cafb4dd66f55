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
from numpy.typing import NDArray

from kvtier.core.page import KEY_BYTES, NO_SUM, SUM_BYTES, Codec, PageMeta, PageRef, PutCode
from kvtier.core.page_columns import PageColumns, cut
from kvtier.core.store import Store
from kvtier.errors import DaemonUnavailable
from kvtier.packing.header_blocks import encode_headers
from kvtier.packing.record import HEADER_BYTES, record_bytes
from kvtier.tiers.crash_points import crash_point
from kvtier.tiers.host import HostArena
from kvtier.transfer.local import frames
from kvtier.transfer.mover import Subject
from kvtier.transfer.place import Identity

__all__ = ["PutReport", "LocalWrites"]

_NO_PARENT = bytes(KEY_BYTES)
_TAKEN = {int(code): code for code in PutCode if code.is_stored}


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
        codes = self._seal(holder, frame)
        self._tell(frame, codes)
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

    def _seal(self, holder: int, frame: frames.Write) -> bytes:
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
        self._write_headers(holder, frame, subject.identity)
        crash_point("local.written")
        codes = self._store.grants.seal_many(
            holder, frame.namespace, frame.shard, generations, _columns(frame)
        ).tobytes()
        crash_point("local.sealed")
        return codes

    def _write_headers(self, holder: int, frame: frames.Write, identity: Identity) -> None:
        generations = np.frombuffer(frame.generations, "<u8")
        live: dict[int, tuple[int, PageRef]] = {}  # generation -> (which page, where)
        for at, ref in enumerate(self._store.grants.refs(holder, generations.tolist())):
            # A grant that is named twice is sealed as the first page.
            if ref is not None and ref.generation not in live:
                live[ref.generation] = at, ref
        if not live:
            return
        which, slots = [at for at, _ in live.values()], [ref.slot for _, ref in live.values()]
        _, ref = next(iter(live.values()))
        blocks = encode_headers(
            identity.header(_common(frame), ref),
            keys=_rows(frame.keys, KEY_BYTES)[which],
            parents=_rows(frame.parents, KEY_BYTES)[which],
            payload_sums=_rows(frame.sums, SUM_BYTES)[which],
            depths=np.frombuffer(frame.depths, "<u4")[which],
            slots=np.array(slots, np.uint64),
            generations=generations[which],
        )
        self._arena.bytes.reshape(-1, HEADER_BYTES)[slots] = blocks

    def _tell(self, frame: frames.Write, codes: bytes) -> None:
        # What is not taken is put again over gRPC, and counted there.
        known = cut(frame.known, KEY_BYTES)
        named = zip(cut(frame.keys, KEY_BYTES), codes, strict=True)
        taken = {key: code for key, code in named if code in _TAKEN}
        if not taken and not known:
            return
        counts = Counter({_TAKEN[code]: n for code, n in Counter(taken.values()).items()})
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


def _rows(column: bytes, width: int) -> NDArray[np.uint8]:
    return np.frombuffer(column, np.uint8).reshape(-1, width)


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
