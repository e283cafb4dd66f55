"""Puts by shared memory, for the connection that is attached: a writer that is made when the first
put needs it, and given back when the connection ends.

One put at a time: several threads would share the memory's speed anyway. While the daemon leaves a
frame unanswered, puts are left to gRPC, which knows what to make of a silent daemon.

Any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtier.client.local_link import LocalLink
from kvtier.client.local_put import LocalPut
from kvtier.client.local_writer import LocalWriter
from kvtier.client.writing import Writer
from kvtier.core.page import Codec, Durability, PutCode
from kvtier.errors import (
    ClientClosed,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidFrame,
    KvtierError,
)
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import OpenedNamespace

__all__ = ["LocalWrites", "WriteCounts"]

log = logging.getLogger(__name__)

#: Slots that were not used for so long are given back.
_IDLE_S: Final = 0.5
_MAKE_WAY_S: Final = 0.05
_RETRY_S: Final = 1.0
_RETRY_S_MAX: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCounts:
    """Pages of puts."""

    stored: int = 0
    existed: int = 0
    #: That only the daemon could take: packed or durable ones, for want of slots, after an end.
    left: int = 0

    def __add__(self, other: WriteCounts) -> WriteCounts:
        return WriteCounts(
            stored=self.stored + other.stored,
            existed=self.existed + other.existed,
            left=self.left + other.left,
        )


class LocalWrites:
    """Beside `link`, the attachment for reading at the same control socket. `rest_soon` has `rest`
    called in a while, and again as long as that is true.
    """

    def __init__(
        self, link: LocalLink, path: str, client_name: str, rest_soon: Callable[[], None]
    ) -> None:
        self._link = link
        self._path = path
        self._client_name = client_name
        self._rest_soon = rest_soon
        self._will_rest = False
        self._turn = threading.Lock()  # of the writer: held through a put
        self._writer: LocalWriter | None = None
        self._try_at = 0.0
        self._pause_s = _RETRY_S
        self._used_at = 0.0
        self._is_closed = False
        self._counts = WriteCounts()
        self.reason = "nothing was put yet"

    @property
    def counts(self) -> WriteCounts:
        return self._counts

    @property
    def is_writing(self) -> bool:
        return self._writer is not None

    def put(self, writer: Writer, opened: OpenedNamespace, deadline: Deadline) -> list[int]:
        """Gives pages their outcome; the indices that are left to the daemon."""
        every = list(range(len(writer.keys)))
        if not self._turn.acquire(timeout=max(0.0, deadline.at - time.monotonic())):
            writer.fail(every, PutCode.TIMEOUT)
            return []
        try:
            options = writer.options
            is_raw = options.codec is Codec.RAW and options.durability is Durability.HOST
            channel = self._channel(deadline) if is_raw else None
            if channel is None:
                left = every
                self._count(WriteCounts(left=len(left)))
            else:
                left = self._put(channel, writer, opened, deadline)
            if left and self._writer is not None:
                self._make_way(self._writer, deadline)
            if self._is_closed:
                self._end("the connection is closed")
            if self._writer is not None and not self._will_rest:
                self._will_rest = True
                self._rest_soon()
        finally:
            self._used_at = time.monotonic()
            self._turn.release()
        return left

    def _put(
        self, channel: LocalWriter, writer: Writer, opened: OpenedNamespace, deadline: Deadline
    ) -> list[int]:
        put = LocalPut(channel, self._link.view, self._link.summer, writer, opened, deadline)
        try:
            while channel.unanswered and channel.receive(None) is not None:
                pass  # of a put that did not wait for them
            if channel.is_silent:
                put.left += range(len(writer.keys))
            else:
                put.run()
        except ClientClosed as error:
            self._end(str(error))
        except KvtierError as error:
            self._end(str(error))
            log.warning("local.writer_lost", extra={"why": str(error), "remedy": error.remedy})
        except BaseException:
            # Interrupted anywhere: what the pool says may not be so. The daemon knows.
            self._end("a put was interrupted")
            raise
        self._count(WriteCounts(stored=put.stored, existed=put.existed, left=len(put.left)))
        return sorted(put.left)

    def _make_way(self, channel: LocalWriter, deadline: Deadline) -> None:
        """What goes over gRPC now may need the room that was granted here for later."""
        if not (channel.holds or channel.unanswered):
            return
        within = Deadline(min(deadline.at, time.monotonic() + _MAKE_WAY_S))
        try:
            channel.give_back(within)
        except DeadlineExceeded:
            pass  # gRPC will find out
        except KvtierError as error:
            self._end(str(error))

    def stop(self) -> None:
        """A put that waits for the daemon gives up."""
        writer = self._writer
        if writer is not None:
            writer.is_stopped = True

    def rest(self) -> bool:
        """Gives back slots that are not used; whether there are some. Waits for nothing."""
        if not self._turn.acquire(blocking=False):
            return True
        try:
            self._will_rest = self._rest()
            return self._will_rest
        finally:
            self._turn.release()

    def _rest(self) -> bool:
        writer = self._writer
        if writer is None or not (writer.holds or writer.unanswered):
            return False
        if time.monotonic() - self._used_at < _IDLE_S:
            return True
        try:
            return writer.give_back()
        except (DaemonUnavailable, DeadlineExceeded, InvalidFrame) as error:
            self._end(str(error))
            return False

    def close(self) -> None:
        """Gives everything back, after the put that runs."""
        self._is_closed = True
        self.stop()
        if self._turn.acquire(blocking=False):
            try:
                self._end("the connection is closed")
            finally:
                self._turn.release()

    def _channel(self, deadline: Deadline) -> LocalWriter | None:
        if self._writer is not None:
            self._writer.is_stopped = False
        if self._is_closed:  # after that: `close` stops what it finds
            return None
        if self._writer is None and time.monotonic() >= self._try_at:
            try:
                self._writer = LocalWriter.attach(
                    self._path,
                    deadline,
                    boot_id=self._link.boot_id,
                    client_name=self._client_name,
                )
            except KvtierError as error:
                self._end(str(error))
                log.warning("local.no_writer", extra={"why": str(error), "remedy": error.remedy})
            else:
                self._pause_s, self.reason = _RETRY_S, ""
        return self._writer

    def _end(self, why: str) -> None:
        writer, self._writer = self._writer, None
        self.reason = why
        self._try_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RETRY_S_MAX)
        if writer is not None:
            writer.close()

    def _count(self, more: WriteCounts) -> None:
        self._counts += more
