"""Whether a connection reads the daemon's shared memory, and why not.

Attaching goes on beside the calls, which go over gRPC until it is done: the first attachment of a
process loads the compiled loops, for half a second. When the daemon ends the attachment ends with
it, and the next daemon that a namespace is opened at is attached to anew.

`offered` and `close` belong to the connection's event loop; all else may be called from any thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvtier.client.local_link import LocalLink
from kvtier.client.local_reads import LocalCounts, LocalReads
from kvtier.errors import KvtierError

__all__ = ["LocalAttachment", "LocalState"]

log = logging.getLogger(__name__)

#: The daemon hears of what was used within a second.
_TELL_S: Final = 0.5
_CLOSE_S_MAX: Final = 0.5
_ENDED: Final = "the daemon has ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """`reason` says why a connection is not attached; `kernels` which inner loops it uses."""

    is_attached: bool
    reason: str
    kernels: str
    counts: LocalCounts


class LocalAttachment:
    def __init__(self, client_name: str, *, is_wanted: bool) -> None:
        self._client_name = client_name
        self._is_wanted = is_wanted
        self._lock = threading.Lock()  # of what the attaching thread and the loop both change
        self._reads: LocalReads | None = None
        self._boot_id = 0  # that was tried last
        self._reason = "no namespace was opened yet" if is_wanted else 'plane is "grpc"'
        self._counts = LocalCounts()  # of attachments that have ended
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def state(self) -> LocalState:
        with self._lock:
            reads, reason, counts = self._reads, self._reason, self._counts
            if reads is not None:
                counts += reads.counts
                reason = "" if reads.link.is_alive() else _ENDED
            return LocalState(
                is_attached=not reason,
                reason=reason,
                kernels=reads.link.view.kernels if reads is not None else "",
                counts=counts,
            )

    def reads(self, boot_id: int) -> LocalReads | None:
        """What reads the memory of this boot, if attached to it."""
        reads = self._reads
        return reads if reads is not None and self._boot_id == boot_id else None

    def offered(self, socket_path: str, boot_id: int) -> None:
        """A daemon of this boot answers, and has a control socket there (empty: none)."""
        if not self._is_wanted or self._is_closed or boot_id == self._boot_id:
            return
        if self._thread is not None and self._thread.is_alive():
            return  # the next call that opens a namespace looks again
        self._let_go()
        self._boot_id = boot_id
        if not socket_path:
            self._reason = "the daemon does not serve the local plane (local.plane)"
            return
        self._reason = "attaching"
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=self._attach, args=(socket_path, boot_id), name="kvtier-attach", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        if self._telling is not None:
            self._telling.cancel()
        self._let_go()
        if self._thread is not None:
            self._thread.join(_CLOSE_S_MAX)

    def _attach(self, socket_path: str, boot_id: int) -> None:
        try:
            link = LocalLink.attach(socket_path, boot_id=boot_id, client_name=self._client_name)
        except KvtierError as error:
            self._reason = str(error)
            log.warning("local.not_attached", extra={"why": str(error), "remedy": error.remedy})
            return
        with self._lock:
            if not self._is_closed:
                self._reads = LocalReads(link, self._tell_soon)
                return
        link.close()

    def _let_go(self) -> None:
        with self._lock:
            reads, self._reads = self._reads, None
            if reads is not None:
                self._counts += reads.counts
                self._reason = _ENDED
        if reads is not None:
            reads.link.close()

    def _tell_soon(self) -> None:
        loop = self._loop
        if loop is None or self._is_closed:
            return
        with suppress(RuntimeError):  # the loop was closed meanwhile, and the connection with it
            loop.call_soon_threadsafe(self._tell_later)

    def _tell_later(self) -> None:
        if not self._is_closed and self._loop is not None:
            self._telling = self._loop.call_later(_TELL_S, self._tell)

    def _tell(self) -> None:
        reads = self._reads
        if reads is not None:
            reads.link.tell()
