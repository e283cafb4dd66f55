"""The process that reads pages again: `python -m kvtier.daemon.scrub_worker`, started by
daemon/scrub_process.py.

Promise: it reads and writes nothing; it says of each page it is sent whether header and payload
are, at this slot, what the daemon's index says, and keeps the system's refusal to read apart from
wrong bytes. It judges alone: what becomes of a bad page is the daemon's to decide. It runs at the
lowest priority, keeps to its rate, and ends when its input ends or the daemon dies. Neither torch
nor gRPC nor protobuf is loaded. One thread; exit code 0, or a traceback on standard error.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

from kvtier.core.page import Tier
from kvtier.daemon.scrub_protocol import (
    FRAME_BYTES_MAX,
    LENGTH,
    Answer,
    Batch,
    Finding,
    Hello,
    Item,
    Setup,
    decode,
    encode,
)
from kvtier.errors import CorruptRecord
from kvtier.packing.checksum import verify_payload
from kvtier.packing.record import HEADER_BYTES, decode_header
from kvtier.tiers.base import SLOT_BYTES
from kvtier.tiers.direct_file import DirectFile, aligned_buffer
from kvtier.tiers.nvme_segment import SEGMENT_HEADER_BYTES

__all__ = ["Checker", "Pacer", "fault_of", "main"]

_NICE_LOWEST: Final = 19
_PR_SET_PDEATHSIG: Final = 1
#: The C library has no function for it, and its number is another on every machine.
_IOPRIO_SET: Final = {
    "x86_64": 251,
    "aarch64": 30,
    "riscv64": 30,
    "ppc64le": 273,
    "s390x": 282,
}
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_IDLE: Final = 3 << 13
#: A pause shorter than this is not made but saved up.
_PAUSE_LEAST_S: Final = 0.005
#: So much time that was not used can be made up for.
_CREDIT_S: Final = 0.05


def main() -> int:
    """Serves the daemon at the other end of standard input and output; the exit code."""
    # A Ctrl-C in the daemon's terminal reaches this process too: the daemon alone decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    problems = [*_lower_cpu_priority(), *(io := _lower_io_priority())]
    source, sink = sys.stdin.fileno(), sys.stdout.fileno()
    try:
        body = _read_frame(source)
        if body is None:
            return 0
        setup = Setup.from_wire(decode(body))
        problems += _die_with(setup.parent_pid)
        hello = Hello(nice=os.nice(0), io_idle=not io, problems=tuple(problems))
        _write(sink, encode(hello.to_wire()))
        with Checker(setup, Pacer(setup.bytes_per_second)) as checker:
            while (body := _read_frame(source)) is not None:
                answer = checker.check(Batch.from_wire(decode(body)))
                _write(sink, encode(answer.to_wire()))
    except BrokenPipeError:
        return 0  # nobody is there any more to hear the answer
    return 0


class Pacer:
    """Keeps reads to a rate. `clock` (monotonic) and `sleep` are in seconds."""

    def __init__(
        self,
        bytes_per_second: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._paid_at = clock()  # when everything taken so far is within the rate

    @property
    def owed_s(self) -> float:
        """How long a read has to wait now; 0 when it is not worth a pause."""
        owed = self._paid_at - self._clock()
        return owed if owed >= _PAUSE_LEAST_S else 0.0

    def take(self, read_bytes: int) -> None:
        """Returns when a read of so many bytes may begin."""
        if (owed := self.owed_s) > 0:
            self._sleep(owed)
        self._paid_at = max(self._paid_at, self._clock() - _CREDIT_S) + read_bytes / self._rate


class Checker:
    """Reads and judges the pages of batches. Raises ValueError for a page outside its tier."""

    def __init__(self, setup: Setup, pacer: Pacer) -> None:
        self._setup = setup
        self._pacer = pacer
        self._buffer = aligned_buffer(HEADER_BYTES)
        self._arena: mmap.mmap | None = None
        if setup.arena_fd >= 0:
            # All of the file: with huge pages no other length can be mapped.
            size = os.fstat(setup.arena_fd).st_size
            self._arena = mmap.mmap(setup.arena_fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
            self._arena.madvise(mmap.MADV_DONTDUMP)  # people's prompts: not for a core file
            os.close(setup.arena_fd)  # it could write

    def check(self, batch: Batch) -> Answer:
        """What is wrong with the pages of `batch`."""
        corrupt: list[Finding] = []
        io_errors: list[Finding] = []
        # Opened for each batch: the daemon holds its segments in place meanwhile, and only then.
        with ExitStack() as files:
            opened: dict[int, DirectFile] = {}
            for index, item in enumerate(batch.items):
                self._pacer.take(item.record_bytes)
                try:
                    if item.tier is Tier.NVME:
                        slab = self._slab_of(item)
                        if slab not in opened:
                            opened[slab] = self._open(batch, slab, files)
                        record = self._from_segment(opened[slab], item)
                    else:
                        record = self._from_arena(item)
                    with record:
                        if fault := fault_of(record, item):
                            corrupt.append(Finding(index, fault))
                except OSError as error:
                    io_errors.append(Finding(index, _words(error)))
        return Answer(
            number=batch.number,
            corrupt=tuple(corrupt),
            io_errors=tuple(io_errors),
            owed_s=self._pacer.owed_s,
        )

    def close(self) -> None:
        """Unmaps the arena."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _from_arena(self, item: Item) -> memoryview:
        start = item.slot * SLOT_BYTES
        end = start + item.record_bytes
        if item.tier is not Tier.HOST or self._arena is None or end > self._setup.arena_bytes:
            raise ValueError(f"slot {item.slot} of tier {item.tier.name} cannot be read here")
        with memoryview(self._arena) as whole:
            return whole[start:end]

    def _slab_of(self, item: Item) -> int:
        segment_bytes = self._setup.segment_bytes
        within = item.slot * SLOT_BYTES % segment_bytes if segment_bytes else 0
        if within + item.record_bytes > segment_bytes:
            raise ValueError(f"slot {item.slot} with {item.record_bytes} bytes leaves its segment")
        return item.slot * SLOT_BYTES // segment_bytes

    def _open(self, batch: Batch, slab: int, files: ExitStack) -> DirectFile:
        path = batch.segments.get(slab)
        if path is None:
            raise ValueError(f"no file is named for slab {slab}")
        file = DirectFile.open(path, write=False, create=False, mode=self._setup.direct)
        files.callback(file.close)
        return file

    def _from_segment(self, file: DirectFile, item: Item) -> memoryview:
        if len(self._buffer) < item.record_bytes:
            self._buffer = aligned_buffer(item.record_bytes)
        record = self._buffer[: item.record_bytes]
        within = item.slot * SLOT_BYTES % self._setup.segment_bytes
        file.read_at(SEGMENT_HEADER_BYTES + within, record)
        return record


def fault_of(record: memoryview, item: Item) -> str:
    """Why these bytes are not the page that the index names; "" when they are."""
    try:
        header = decode_header(record)
    except CorruptRecord as error:
        return str(error)
    facts = {
        "tier": (header.tier, item.tier),
        "slot": (header.slot, item.slot),
        "generation": (header.generation, item.generation),
        "boot": (header.boot_id, item.boot_id or header.boot_id),
        "fingerprint": (header.fingerprint, item.fingerprint),
        "namespace generation": (header.namespace_generation, item.namespace_generation),
        "shard": (header.shard, item.shard),
        "key": (header.key, item.key),
        "length": (header.length, item.length),
        "codec": (header.codec, item.codec),
    }
    differ = [name for name, (found, expected) in facts.items() if found != expected]
    if differ:
        return f"the header is another page's: {', '.join(differ)}"
    whole = verify_payload(
        record[HEADER_BYTES : HEADER_BYTES + item.length],
        header.payload_sum,
        key=item.key,
        fingerprint=item.fingerprint,
        namespace_generation=item.namespace_generation,
        shard=item.shard,
        codec=item.codec,
        length=item.length,
    )
    return "" if whole else "the payload does not match payload_sum"


def _lower_cpu_priority() -> list[str]:
    """What could not be done."""
    try:
        os.nice(_NICE_LOWEST)
    except OSError as error:
        return [f"CPU priority: {_words(error)}"]
    return []


def _lower_io_priority() -> list[str]:
    """What could not be done."""
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        return [f"idle I/O class: not known how on {platform.machine()}"]
    words = [ctypes.c_long(word) for word in (number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)]
    if ctypes.CDLL(None, use_errno=True).syscall(*words) != 0:
        return [f"idle I/O class: {os.strerror(ctypes.get_errno())}"]
    return []


def _die_with(parent_pid: int) -> list[str]:
    """Killed when the daemon dies, also while it is stopped or reads. What could not be done."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_ulong(word) for word in (signal.SIGKILL, 0, 0, 0)]
    if libc.prctl(_PR_SET_PDEATHSIG, *words) != 0:
        return [f"end with the daemon: {os.strerror(ctypes.get_errno())}"]
    if os.getppid() != parent_pid:
        raise BrokenPipeError(errno.EPIPE, "the daemon has died already")
    return []


def _read_frame(source: int) -> bytes | None:
    """The next frame's body; None when the input has ended. Raises ValueError."""
    head = _read(source, LENGTH.size)
    if not head:
        return None
    (length,) = LENGTH.unpack(head)
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {length} bytes")
    return _read(source, length)


def _read(source: int, count: int) -> bytes | None:
    """`count` bytes; None when the input ends before them: whoever wrote them is gone."""
    got = bytearray()
    while len(got) < count:
        piece = os.read(source, count - len(got))
        if not piece:
            return None
        got += piece
    return bytes(got)


def _write(sink: int, frame: bytes) -> None:
    rest = memoryview(frame)
    while rest:
        rest = rest[os.write(sink, rest) :]


def _words(error: OSError) -> str:
    return error.strerror or str(error)


if __name__ == "__main__":
    sys.exit(main())
