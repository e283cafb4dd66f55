"""Batches out over ZeroMQ, as SGLang's own publisher sends them: PUB with topic, number and batch,
and a ROUTER that is asked for what somebody missed.

    PUB      topic, number (8 bytes, big-endian), batch
    ROUTER   <- empty, first number wanted
             -> empty, topic, number, batch   for each
             -> empty, empty, -1, empty       at the end

Promise: whoever asks gets every batch from there on, or, where one of them is not kept any more or
was another process's, all that holds now, beginning with AllBlocksCleared, under numbers that end
with the latest. Numbers begin with the milliseconds since 1970 at the start, so that a publisher
that was started anew never goes on with those of the one before: the gap is seen, and asked for.

Nothing here waits for a subscriber: what one does not take is dropped, and is a gap to it. Belongs
to one thread at a time.
"""

from __future__ import annotations

import ipaddress
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kvtier.errors import InvalidConfigValue, MissingExtra
from kvtier_sglang.events.paths import claimed, owners_alone

__all__ = ["Endpoints", "Outlet", "Question", "now"]

_BATCHES_KEPT_MAX: Final = 10_000
_BYTES_KEPT_MAX: Final = 64 << 20
#: Messages that wait for a slow subscriber.
_WAITING_MAX: Final = 10_000
_REQUESTS_A_TURN_MAX: Final = 16
_LINGER_MS: Final = 200
_NUMBER_BYTES: Final = 8
_END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


def now() -> float:
    """Seconds since 1970, for those who read a batch; nothing here goes by them."""
    return datetime.now(UTC).timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where to bind: tcp://ADDRESS:PORT or ipc://PATH. Without `replay` nobody can ask."""

    events: str
    replay: str = ""
    topic: str = ""

    def checked(self, *, allows_network: bool, dp_rank: int) -> Endpoints:
        """Those of data parallel replica `dp_rank`: ports count up from the first one's, paths get
        its number behind. Raises InvalidConfigValue for what cannot be bound, can be reached from
        other machines without `allows_network`, or is a port of another replica.
        """
        _check_apart(self.events, self.replay, dp_rank)
        places = [
            _place(name, endpoint, allows_network, dp_rank) if endpoint else ""
            for name, endpoint in (
                ("kvtier_events_endpoint", self.events),
                ("kvtier_events_replay_endpoint", self.replay),
            )
        ]
        return Endpoints(events=places[0], replay=places[1], topic=self.topic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Who asks, and from which number on."""

    client: bytes
    first: int


class Outlet:
    """Binds at once. Raises MissingExtra without pyzmq, InvalidConfigValue where it cannot bind."""

    def __init__(self, endpoints: Endpoints) -> None:
        zmq = _zmq()
        self._zmq = zmq
        self._topic = endpoints.topic.encode()
        self._number = int(now() * 1000) - 1
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._replay: Any = None
        self._put_back: list[Question] = []
        self._locks: list[int] = []
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, _LINGER_MS)
        try:
            self._events = self._bound(zmq.PUB, endpoints.events)
            if endpoints.replay:
                self._replay = self._bound(zmq.ROUTER, endpoints.replay)
        except InvalidConfigValue:
            self._context.destroy(linger=0)
            self._unlock()
            raise

    @property
    def takes_questions(self) -> bool:
        return self._replay is not None

    def publish(self, batch: bytes) -> None:
        """To all who subscribe; kept for those who ask."""
        self._number += 1
        self._kept.append((self._number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > _BATCHES_KEPT_MAX or self._kept_bytes > _BYTES_KEPT_MAX:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._events.send_multipart([self._topic, _bytes(self._number), batch])

    def questions(self) -> Sequence[Question]:
        """Of those who ask now, some; the others have the next turn."""
        asked, self._put_back = self._put_back, []
        if self._replay is None:
            return asked
        for _ in range(_REQUESTS_A_TURN_MAX - len(asked)):
            try:
                frames = self._replay.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                break
            if len(frames) == 3 and len(frames[2]) == _NUMBER_BYTES:
                asked.append(Question(client=frames[0], first=int.from_bytes(frames[2], "big")))
        return asked

    def put_back(self, question: Question) -> None:
        """It comes again in the next turn."""
        self._put_back.append(question)

    def answer_kept(self, question: Question) -> bool:
        """Whether all that is wanted is kept, and sent."""
        oldest = self._kept[0][0] if self._kept else self._number + 1
        if not oldest <= question.first <= self._number + 1:
            return False
        self._send(question.client, (kept for kept in self._kept if kept[0] >= question.first))
        return True

    def answer(self, question: Question, whole: Sequence[bytes]) -> None:
        """With the batches of all that holds."""
        self._send(question.client, enumerate(whole, self._number + 1 - len(whole)))

    def close(self) -> None:
        """What was published goes out first, for a moment."""
        self._context.destroy(linger=_LINGER_MS)
        self._unlock()

    def _unlock(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()

    def _send(self, client: bytes, numbered: Iterable[tuple[int, bytes]]) -> None:
        try:
            for number, batch in numbered:
                message = [client, b"", self._topic, _bytes(number), batch]
                self._replay.send_multipart(message, self._zmq.NOBLOCK)
            self._replay.send_multipart([client, b"", b"", _END, b""], self._zmq.NOBLOCK)
        except self._zmq.ZMQError:
            return  # gone, or it does not take them: without the end it asks again

    def _bound(self, kind: int, endpoint: str) -> Any:
        zmq = self._zmq
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, _WAITING_MAX)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if endpoint.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        try:
            if endpoint.startswith("ipc://"):
                path = Path(endpoint.removeprefix("ipc://"))
                self._locks.append(claimed(path))
                with owners_alone():
                    socket.bind(endpoint)
                path.chmod(0o600)
            else:
                socket.bind(endpoint)
        except (zmq.ZMQError, OSError) as error:
            raise InvalidConfigValue(
                f"KV events cannot be served at {endpoint}: {error}",
                remedy="give kvtier_events_endpoint and kvtier_events_replay_endpoint addresses "
                "that are free",
            ) from error
        return socket


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise MissingExtra(
            "KV events need pyzmq", remedy="pip install pyzmq, or leave kvtier_events_endpoint out"
        ) from error
    return zmq


def _bytes(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")


def _place(name: str, endpoint: str, allows_network: bool, dp_rank: int) -> str:
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{dp_rank}" if dp_rank else endpoint
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not endpoint.startswith("tcp://") or not host or not port:
        raise InvalidConfigValue(
            f"{name} is {endpoint!r}", remedy="pass tcp://127.0.0.1:PORT or ipc:///PATH"
        )
    if not allows_network and not _is_loopback(host):
        raise InvalidConfigValue(
            f"{name} is {endpoint!r}, which other machines reach; events tell what prompts hold, "
            "and nothing asks who reads them",
            remedy='use tcp://127.0.0.1:PORT or ipc:///PATH, or set "kvtier_events_allow_network"',
        )
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}:{port + dp_rank}"


def _check_apart(events: str, replay: str, dp_rank: int) -> None:
    """Ports that count up meet those of the other kind. How many replicas there are nobody says:
    the first one that would take a port of another is refused.
    """
    if not events.startswith("tcp://") or not replay.startswith("tcp://"):
        return
    try:
        apart = abs((urlsplit(events).port or 0) - (urlsplit(replay).port or 0))
    except ValueError:
        return  # no endpoint, which is said elsewhere
    if apart <= dp_rank:
        raise InvalidConfigValue(
            f"kvtier_events_endpoint and kvtier_events_replay_endpoint are {apart} ports apart, "
            f"and replica {dp_rank} of data parallelism would have a port of another one",
            remedy="put them further apart than there are replicas, as 5557 and 5657",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
