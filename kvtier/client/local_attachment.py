"""Whether a connection reads the daemon's shared memory, and why not.

Attaching goes on beside the calls, which go over gRPC until it is done: the first attachment of a
process loads the compiled loops, for half a second. When the daemon ends, or cuts the connection
off, its memory is let go of at once, and attaching is tried again, after a failure ever less often.

A process must not be forked while another thread imports: the child would wait for that thread,
which it does not have. So a fork waits until what is being loaded here is there.

`offered` and `close` belong to the connection's event loop; all else may be called from any thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from kvtier.client.local_link import LocalLink
from kvtier.client.local_puts import LocalPuts, PutCounts, PutTally
from kvtier.client.local_reads import LocalCounts, LocalReads
from kvtier.errors import KvtierError
from kvtier.packing.bulk_sums import load_summer
from kvtier.transfer.local.loading import load_kernels

__all__ = ["LocalAttachment", "LocalState"]

log = logging.getLogger(__name__)

#: The daemon hears of what was used within a second.
_TELL_S: Final = 0.5
#: Slots that were granted and not used are given back within two of these.
_REST_S: Final = 0.5
_CLOSE_S_MAX: Final = 0.5
_POLL_S: Final = 0.01
_RETRY_S: Final = 1.0
_RETRY_S_MAX: Final = 60.0
_FORK_WAITS_S: Final = 60.0

_loading: Final = threading.Lock()


def _after_fork() -> None:
    with suppress(RuntimeError):  # the wait was given up
        _loading.release()


os.register_at_fork(
    before=lambda: _loading.acquire(timeout=_FORK_WAITS_S),
    after_in_parent=_after_fork,
    after_in_child=_after_fork,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """`reason` says why a connection is not attached; `kernels` which inner loops it uses; `untold`
    how many uses of pages the daemon was too busy to hear of. `not_writing` says why puts go over
    gRPC, and is empty while they do not.
    """

    is_attached: bool
    reason: str
    kernels: str
    counts: LocalCounts
    untold: int
    not_writing: str
    puts: PutCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attached:
    reads: LocalReads
    puts: LocalPuts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """`counts` and `untold` are of attachments that have ended."""

    attached: _Attached | None = None
    reason: str
    counts: LocalCounts = field(default_factory=LocalCounts)
    untold: int = 0


class LocalAttachment:
    def __init__(self, client_name: str, *, is_wanted: bool) -> None:
        self._client_name = client_name
        self._is_wanted = is_wanted
        # Of the loop's thread and the one that attaches. Callers take no lock: one may be
        # interrupted by a handler that waits for the loop, which must not wait for the caller.
        self._lock = threading.RLock()
        # Replaced as a whole, so that a caller looks once.
        self._standing = _Standing(
            reason="no namespace was opened yet" if is_wanted else 'plane is "grpc"'
        )
        self._offer: tuple[str, int] | None = None  # socket and boot
        self._tally = PutTally()
        self._thread: threading.Thread | None = None
        self._try_at = 0.0
        self._pause_s = _RETRY_S
        self._loop: asyncio.AbstractEventLoop | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._is_told = False  # that it is not attached

    @property
    def state(self) -> LocalState:
        now = self._standing
        if now.attached is None:
            counts, untold, kernels, not_writing = now.counts, now.untold, "", now.reason
        else:
            link = now.attached.reads.link
            counts = now.counts + now.attached.reads.counts
            untold = now.untold + link.untold
            kernels, not_writing = link.view.kernels, now.attached.puts.reason
        return LocalState(
            is_attached=now.attached is not None,
            reason="" if now.attached is not None else now.reason,
            kernels=kernels,
            counts=counts,
            untold=untold,
            not_writing=not_writing,
            puts=self._tally.counts,
        )

    def reads(self, boot_id: int) -> LocalReads | None:
        """What reads the memory of this boot, if attached to it; else attaching is tried again when
        its time has come.
        """
        attached = self._of_boot(boot_id)
        return None if attached is None else attached.reads

    def puts(self, boot_id: int) -> LocalPuts | None:
        """What writes to the memory of this boot, while `reads` has it."""
        attached = self._of_boot(boot_id)
        return None if attached is None else attached.puts

    def _of_boot(self, boot_id: int) -> _Attached | None:
        attached = self._standing.attached
        if attached is not None:
            return attached if attached.reads.link.boot_id == boot_id else None
        if self._offer is not None and time.monotonic() >= self._try_at:
            self._on_loop(self._begin)
        return None

    def offered(self, socket_path: str, boot_id: int) -> None:
        """A daemon of this boot answers, and has a control socket there (empty: none)."""
        if not self._is_wanted or (self._offer is not None and self._offer[1] == boot_id):
            return
        self._loop = asyncio.get_running_loop()
        self._let_go("another daemon answers")
        with self._lock:
            self._offer = (socket_path, boot_id) if socket_path else None
            self._try_at, self._pause_s = 0.0, _RETRY_S
            if not socket_path:
                self._say("the daemon does not serve the local plane (local.plane)")
        if socket_path:
            self._begin()

    async def close(self) -> None:
        """Lets go; an attachment that is under way ends by itself."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        for timer in (self._telling, self._resting):
            if timer is not None:
                timer.cancel()
        self._let_go("the connection is closed")
        deadline = time.monotonic() + _CLOSE_S_MAX
        # A thread's end sets no event.
        while thread and thread.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def _begin(self) -> None:
        """Tries to attach, in a thread, unless one does or its time has not come."""
        with self._lock:
            is_busy = self._thread is not None and self._thread.is_alive()
            is_early = time.monotonic() < self._try_at
            is_done = self._is_closed or self._standing.attached is not None
            if self._offer is None or is_done or is_busy or is_early:
                return
            self._say("attaching")
            self._thread = threading.Thread(
                target=self._attach, args=self._offer, name="kvtier-attach", daemon=True
            )
            try:
                self._thread.start()
            except (RuntimeError, MemoryError) as error:
                why = str(error) or type(error).__name__
            else:
                return
        # A call must not fail for want of a thread that it can do without.
        remedy = "raise the limits of threads and of address space (ulimit -u, -v)"
        self._failed(f"there is no thread to attach in: {why}", remedy)

    def _attach(self, socket_path: str, boot_id: int) -> None:
        try:
            with _loading:
                load_kernels()
                load_summer()
            link = LocalLink.attach(socket_path, boot_id=boot_id, client_name=self._client_name)
        except KvtierError as error:
            self._failed(str(error), error.remedy)
            return
        except Exception as error:
            # An engine must not lose a thread to its cache without a word.
            words = "an unexpected error while shared memory was attached; calls go over gRPC"
            log.exception(words, extra={"event": "local.attach_crashed"})
            why = f"an unexpected error, see the log: {type(error).__name__}: {error}"
            self._failed(why, "report it; calls go over gRPC")
            return
        with self._lock:
            is_wanted = not self._is_closed and self._offer == (socket_path, boot_id)
            if is_wanted:
                puts = LocalPuts(
                    link,
                    socket_path,
                    self._client_name,
                    tally=self._tally,
                    rest_soon=self._rest_soon,
                )
                reads = LocalReads(link, self._tell_soon, self._ended_soon)
                self._standing = replace(self._standing, attached=_Attached(reads=reads, puts=puts))
                self._pause_s, self._is_told = _RETRY_S, False
        if is_wanted:
            self._on_loop(self._watch)
        else:
            link.close()

    def _failed(self, why: str, remedy: str) -> None:
        with self._lock:
            self._say(why)
            self._try_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _RETRY_S_MAX)
            # Once until it is attached again: a daemon that starts anew is asked several times.
            level, self._is_told = logging.DEBUG if self._is_told else logging.WARNING, True
        extra = {"event": "local.not_attached", "why": why, "remedy": remedy}
        log.log(
            level, "shared memory is not used, calls go over gRPC: %s; %s", why, remedy, extra=extra
        )

    def _say(self, reason: str) -> None:
        self._standing = replace(self._standing, reason=reason)

    def _watch(self) -> None:
        """Lets go when the daemon ends, also while nobody calls."""
        attached = self._standing.attached
        if attached is not None and self._loop is not None:
            self._loop.add_reader(attached.reads.link.fileno(), self._ended)

    def _ended_soon(self) -> None:
        self._on_loop(self._ended)

    def _ended(self) -> None:
        """The control socket says something: its end, or why it was cut off."""
        attached = self._standing.attached
        if attached is not None and not attached.reads.link.is_alive():
            self._let_go(attached.reads.link.farewell())

    def _let_go(self, why: str) -> None:
        with self._lock:
            attached = self._standing.attached
            if attached is None:
                return
            reads, puts = attached.reads, attached.puts
            self._standing = _Standing(
                reason=why,
                counts=self._standing.counts + reads.counts,
                untold=self._standing.untold + reads.link.untold,
            )
            self._try_at = time.monotonic() + self._pause_s

        def close() -> None:
            if self._loop is not None:
                self._loop.remove_reader(reads.link.fileno())
            reads.link.close()

        # Calls that run keep the memory until they end; it is unmapped by whoever is the last.
        puts.close()
        reads.link.view.close()
        if not self._on_loop(close):
            reads.link.close()

    def _on_loop(self, call: Callable[[], None]) -> bool:
        """Has `call` run on the connection's loop; False when that was closed."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            return False
        return True

    def tell_now(self) -> None:
        """Tells what was used so far, without waiting for more. On the connection's loop."""
        self._tell()

    def _tell_soon(self) -> None:
        self._on_loop(self._tell_later)

    def _tell_later(self) -> None:
        if not self._is_closed and self._loop is not None:
            self._telling = self._loop.call_later(_TELL_S, self._tell)

    def _tell(self) -> None:
        attached = self._standing.attached
        if attached is not None and attached.reads.link.tell():
            self._tell_later()

    def _rest_soon(self) -> None:
        self._on_loop(self._rest_later)

    def _rest_later(self) -> None:
        if not self._is_closed and self._loop is not None:
            self._resting = self._loop.call_later(_REST_S, self._rest)

    def _rest(self) -> None:
        attached = self._standing.attached
        if attached is not None and attached.puts.rest():
            self._rest_later()
