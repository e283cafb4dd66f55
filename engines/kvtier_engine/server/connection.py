"""One HTTP/1.1 connection: uvicorn's, with a bound on everything that a client may do to it.

Promise: nothing waits for a client without a deadline, what breaks the protocol is refused with an
answer where one can still be given, and a client that goes while it is answered is noticed, also
when it has sent something ahead. One event loop.

uvicorn (with h11) parses, runs the routes and sends. It has no deadline for a head, for a client
that does not read, or before the first request, words its refusals as plain text, and stops reading
(so that it does not see the end) when a client sends ahead: that is what is added here.
"""

from __future__ import annotations

import asyncio
import http
import json
import sys
from typing import cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kvtier_engine.server.errors import UvicornUnsuitable
from kvtier_engine.server.http import Refused
from kvtier_engine.server.limits import Limits

__all__ = ["Connection", "connection_of"]


#: Of a client whose request has not come, or not all of it. h11 has three others: of one that is
#: whole, that is the last, and that offers another protocol.
_NOT_WHOLE = (h11.IDLE, h11.SEND_BODY, h11.CLOSED, h11.ERROR)
#: From one sign to a client that has closed for writing to the next.
_PROBE_SECONDS = 0.25
#: What is called or replaced here and is no public part of uvicorn.
_NEEDED = (
    "_should_upgrade",
    "_unset_keepalive_if_required",
    "connection_lost",
    "connection_made",
    "data_received",
    "eof_received",
    "handle_events",
    "on_response_complete",
    "pause_writing",
    "resume_writing",
    "send_400_response",
    "shutdown",
    "timeout_keep_alive_handler",
)


class Connection(H11Protocol):
    """Made by uvicorn, of the class that `connection_of` makes."""

    limits: Limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive = self.limits.idle_seconds_max  # type: ignore[assignment]
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._is_half_closed = False
        self._early = bytearray()
        self._is_refused = False
        self._dropped = 0
        many = self.limits.connections_max
        if len(self.connections) > 2 * many:
            transport.abort()
        elif len(self.connections) > many:
            self._refuse(Refused(503, "server_overloaded", "too many connections; wait"))
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.limits.idle_seconds_max, self.timeout_keep_alive_handler
            )

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        timers = (self._head_timer, self._write_timer, self._end_timer, self._probe_timer)
        for timer in timers:
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._dropped += len(data)
            if self._dropped > self.limits.linger_bytes_max:
                self.transport.abort()
        elif self._is_answering:
            # Kept here, and not given to uvicorn, which would stop reading.
            self._early += data
            if len(self._early) > self.limits.early_bytes_max:
                message = "too much was sent ahead of the answer"
                self._refuse(Refused(400, "sent_ahead", message))
        else:
            self._feed(data)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A client that is done with sending may be gone, or wait for its answer: the same to see.
        A sign that an answer is on its way, which HTTP/1.1 lets be sent any number of times, comes
        back as a reset from one that is gone, and the next write ends the connection.
        """
        cycle = self._open_cycle
        if cycle is None or not self._is_answering or self._is_refused:
            return None
        if not self._is_half_closed:
            if cycle.response_started or cycle.scope["http_version"] != "1.1":
                return None
            self._is_half_closed = True
            self._probe()
        return True

    def _probe(self) -> None:
        cycle = self._open_cycle
        if cycle is None:
            return
        if not cycle.response_started:
            sign = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(sign) or b"")
        self._probe_timer = self.loop.call_later(_PROBE_SECONDS, self._probe)

    def _feed(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_refused:
            return
        if self._is_answering:  # uvicorn stops reading when a second request came with the first
            self.flow.resume_reading()
        if self._end_timer is not None and self.conn.their_state is not h11.SEND_BODY:
            self._end_timer.cancel()
            self._end_timer = None
        if self.conn.their_state is not h11.IDLE:
            self._end_head_timer()
        elif self._head_timer is None:
            seconds = self.limits.request_seconds_max
            self._head_timer = self.loop.call_later(seconds, self._be_too_late)

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @property
    def _is_answering(self) -> bool:
        """A whole request has come, and its answer has not ended."""
        is_whole = self.conn.their_state not in _NOT_WHOLE
        return is_whole and self._open_cycle is not None

    @property
    def _open_cycle(self) -> RequestResponseCycle | None:
        """The request that is worked on, None between requests."""
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None at first
        return None if cycle is None or cycle.response_complete else cycle

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._end_in(self.limits.write_seconds_max)
        elif self.conn.their_state is h11.SEND_BODY:
            # Answered before the body had come: the rest is read, as a client that is reset while
            # it sends does not see the answer.
            self._end_in(self.limits.linger_seconds_max)
        elif self._early and not self._is_answering:
            early = bytes(self._early)
            self._early.clear()
            self._feed(early)
        if self._is_half_closed and self._open_cycle is None:
            self.transport.close()  # nothing more can come

    def _should_upgrade(self) -> bool:
        return False  # a client that offers another protocol is answered in this one

    def send_400_response(self, msg: str) -> None:
        # Called where h11's error is handled, which knows more: 431 for a head that is too long,
        # 501 for unknown codings.
        error, status = sys.exc_info()[1], 400
        if isinstance(error, h11.RemoteProtocolError):
            msg, status = str(error), error.error_status_hint
        self._refuse(Refused(status, "protocol_error", msg))

    def pause_writing(self) -> None:
        super().pause_writing()
        seconds = self.limits.write_seconds_max
        self._write_timer = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_in(self.limits.linger_seconds_max)

    def shutdown(self) -> None:
        if not self._is_refused:  # it ends by itself
            super().shutdown()

    def _be_too_late(self) -> None:
        self._refuse(Refused(408, "request_timeout", "the request took too long to come"))

    def _refuse(self, refused: Refused) -> None:
        """Gives up the request that is worked on, answers out of turn where no answer has begun,
        and lets the client go on sending for a while: a connection that is closed over unread bytes
        is reset, and the answer lost.
        """
        self._is_refused = True
        self._unset_keepalive_if_required()
        self._end_head_timer()
        if (cycle := self._open_cycle) is not None:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write_whole(refused)
        # Else its answer has been sent before: there is nothing more to say.
        if self._is_half_closed:  # and nothing comes that would have to be read
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self._end_in(self.limits.linger_seconds_max)

    def _write_whole(self, refused: Refused) -> None:
        body = json.dumps(refused.content).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        reason = http.HTTPStatus(refused.status).phrase.encode()
        answer = h11.Response(
            status_code=refused.status,
            headers=list((headers | refused.headers).items()),
            reason=reason,
        )
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def _end_in(self, seconds: float) -> None:
        """By then it is closed, whatever the client does."""
        if self._end_timer is None:
            self._end_timer = self.loop.call_later(seconds, self.transport.abort)


def connection_of(limits: Limits) -> type[Connection]:
    """uvicorn makes connections of a class: this one has its limits. Raises UvicornUnsuitable."""
    if missing := [name for name in _NEEDED if not callable(getattr(H11Protocol, name, None))]:
        raise UvicornUnsuitable(
            f"uvicorn {uvicorn.__version__} is built another way: no {', '.join(missing)}",
            remedy="pip install 'kvtier[engine]', which takes one that is known",
        )
    return type("Connection", (Connection,), {"limits": limits})
