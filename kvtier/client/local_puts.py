"""Puts by shared memory, for the connection that is attached: a channel that is made when the first
put needs it, and given back when the connection ends.

One put at a time: several threads would share the memory's speed anyway. Who does not get his turn
in half of his time goes over gRPC. While the daemon leaves a frame unanswered all do, for that
knows what to make of a silent daemon.

Any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Final

from kvtier.client.local_channel import LocalChannel
from kvtier.client.local_link import LocalLink
from kvtier.client.local_put import LocalPut
from kvtier.client.writing import Writer
from kvtier.core.page import Codec, Durability
from kvtier.errors import ClientClosed, DeadlineExceeded, KvtierError
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import OpenedNamespace

__all__ = ["LocalPuts", "PutCounts", "PutTally"]

log = logging.getLogger(__name__)

#: Slots that were not used for so long are given back.
_IDLE_S: Final = 0.5
_POLL_S: Final = 0.05
_RETRY_S: Final = 1.0
_RETRY_S_MAX: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PutCounts:
    """Pages of puts."""

    stored: int = 0
    existed: int = 0
    #: That only the daemon could take: packed or durable ones, for want of slots, after an end.
    left: int = 0
    timed_out: int = 0


class PutTally:
    """Counts pages of all attachments of a connection. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler of a signal may put in the middle of a put
        self._totals = dict.fromkeys((item.name for item in fields(PutCounts)), 0)

    @property
    def counts(self) -> PutCounts:
        # One step: who asks must not wait for a call that was interrupted.
        return PutCounts(**self._totals.copy())

    def add(self, **more: int) -> None:
        """By the names of PutCounts."""
        with self._lock:
            for name, count in more.items():
                self._totals[name] += count


class LocalPuts:
    """Beside `link`, the attachment for reading at the same control socket. `rest_soon` has `rest`
    called in a while, and again as long as that is true. `reason` says why puts go over gRPC, and
    is empty while they do not.
    """

    def __init__(
        self,
        link: LocalLink,
        path: str,
        client_name: str,
        *,
        tally: PutTally,
        rest_soon: Callable[[], None],
    ) -> None:
        self._link = link
        self._path = path
        self._client_name = client_name
        self._tally = tally
        self._rest_soon = rest_soon
        self._will_rest = False
        # Of the channel, held through a put. It knows its owner, so that an interrupt that comes
        # right behind `acquire` does not keep it from being released.
        self._turn = threading.RLock()
        self._is_busy = False
        self._channel: LocalChannel | None = None
        self._try_at = 0.0
        self._pause_s = _RETRY_S
        self._is_told = False  # that there is no writer
        self._used_at = 0.0
        self._is_closed = False
        self.reason = "nothing was put yet"

    def put(
        self, writer: Writer, opened: OpenedNamespace, deadline: Deadline, stop: threading.Event
    ) -> list[int]:
        """Gives pages their outcome; the indices that are left to the daemon. `stop` ends it."""
        options, every = writer.options, list(range(len(writer.keys)))
        is_raw = options.codec is Codec.RAW and options.durability is Durability.HOST
        left = every
        try:
            if self._has_turn(deadline if is_raw else None, stop) and not self._is_busy:
                with self._undisturbed():
                    left = self._in_turn(writer, opened, deadline, stop) if is_raw else every
                    if left:
                        self._make_way(deadline)
                    self._used_at = time.monotonic()
        finally:
            self._end_turn()
        self._tally.add(left=len(left))
        return left

    def _has_turn(self, deadline: Deadline | None, stop: threading.Event) -> bool:
        """Waits for it until half of the time has gone by, without a deadline not at all."""
        now = time.monotonic()
        until = now if deadline is None else now + (deadline.at - now) / 2
        while not stop.is_set():
            if self._turn.acquire(timeout=max(0.0, min(until - time.monotonic(), _POLL_S))):
                return True
            if time.monotonic() >= until:
                break
        return False

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Around all that the owner of the turn does with the channel: a call in the middle of it,
        by the same thread, has the turn too and must leave the channel alone.
        """
        self._is_busy = True
        try:
            yield
        except BaseException:
            # Interrupted anywhere: what the pool says may not be so. The daemon knows.
            self._end("a put was interrupted")
            raise
        finally:
            self._is_busy = False

    def _end_turn(self) -> None:
        try:
            self._turn.release()
        except RuntimeError:
            return  # it was somebody else's
        if self._is_closed:
            self.close()  # which may have come while somebody was busy

    def _in_turn(
        self, writer: Writer, opened: OpenedNamespace, deadline: Deadline, stop: threading.Event
    ) -> list[int]:
        channel = self._attached(deadline)
        if channel is None:
            return list(range(len(writer.keys)))
        if not self._will_rest:
            self._will_rest = True
            self._rest_soon()
        return self._put(channel, writer, opened, deadline, stop)

    def _put(
        self,
        channel: LocalChannel,
        writer: Writer,
        opened: OpenedNamespace,
        deadline: Deadline,
        stop: threading.Event,
    ) -> list[int]:
        put = LocalPut(channel, self._link, writer, opened, deadline=deadline, stop=stop)
        try:
            while channel.unanswered and channel.receive(None) is not None:
                pass  # of a put that did not wait for them
            if channel.is_silent:
                self.reason = "the daemon does not answer on its control socket"
                return list(range(len(writer.keys)))
            put.run()
            self.reason = "the daemon has no more slots to grant" if put.is_starved else ""
        except ClientClosed as error:
            self._end(str(error))
        except KvtierError as error:
            self._end(str(error))
            words = "a put by shared memory broke off and goes over gRPC"
            self._warn({"event": "local.writer_lost"}, words, error)
        self._tally.add(stored=put.stored, existed=put.existed, timed_out=put.timed_out)
        return put.left

    def _make_way(self, deadline: Deadline) -> None:
        """What goes over gRPC now may need the room that was granted here for later."""
        channel = self._channel
        if channel is None or channel.is_silent or not (channel.holds or channel.unanswered):
            return
        within = Deadline(min(deadline.at, time.monotonic() + _POLL_S))
        try:
            channel.give_back(within)
        except DeadlineExceeded:
            pass  # gRPC will find out
        except KvtierError as error:
            self._end(str(error))

    def rest(self) -> bool:
        """Gives back slots that are not used; whether there are some. Waits for nothing."""
        if not self._turn.acquire(blocking=False):
            return True
        try:
            if self._is_busy:
                return True
            with self._undisturbed():
                self._will_rest = self._rest()
            return self._will_rest
        finally:
            self._end_turn()

    def _rest(self) -> bool:
        channel = self._channel
        if channel is None or not (channel.holds or channel.unanswered):
            return False
        if time.monotonic() - self._used_at < _IDLE_S:
            return True
        try:
            return channel.give_back()
        except KvtierError as error:
            self._end(str(error))
            return False

    def close(self) -> None:
        """Gives everything back, now or after the put that runs."""
        self._is_closed = True
        if self._turn.acquire(blocking=False):
            try:
                if not self._is_busy:
                    self._end("the connection is closed")
            finally:
                self._turn.release()

    def _attached(self, deadline: Deadline) -> LocalChannel | None:
        if self._is_closed:
            return None
        if self._channel is None and time.monotonic() >= self._try_at:
            # Half of the time, so that gRPC has some left to find out what is the matter.
            now = time.monotonic()
            within = Deadline(now + (deadline.at - now) / 2)
            try:
                self._channel = LocalChannel.attach(
                    self._path,
                    within,
                    boot_id=self._link.boot_id,
                    client_name=self._client_name,
                )
            except KvtierError as error:
                self._end(str(error))
                words = "puts go over gRPC, not by shared memory"
                self._warn({"event": "local.no_writer"}, words, error)
            else:
                self._pause_s, self._is_told = _RETRY_S, False
        return self._channel

    def _warn(self, event: dict[str, str], words: str, error: KvtierError) -> None:
        """Once until a writer is there again."""
        level, self._is_told = logging.DEBUG if self._is_told else logging.WARNING, True
        # As text: a record that is kept would keep the error's frames, and so the memory.
        extra = {**event, "why": str(error), "remedy": error.remedy}
        log.log(level, "%s: %s; %s", words, str(error), error.remedy, extra=extra)

    def _end(self, why: str) -> None:
        channel, self._channel = self._channel, None
        self.reason = why
        self._try_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RETRY_S_MAX)
        if channel is not None:
            channel.close()
