"""A router, as far as it listens to KV events: what it believes to lie where.

It goes by the format alone: batches in order of their numbers, and a question to the replay socket
where one is missing. One thread. Close it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

__all__ = ["Router", "zmq"]

#: Tests that import this are skipped without it.
zmq = pytest.importorskip("zmq", reason="KV events need pyzmq")

_ANSWER_S = 10.0
_END = -1


class Router:
    """`loses` says of the n-th message that is news, from 1 on, whether it never arrives."""

    def __init__(
        self, events: str, replay: str, loses: Callable[[int], bool] = lambda _count: False
    ) -> None:
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.subscribe(b"")
        self._events.connect(events)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay)
        self._loses = loses
        self._next: int | None = None
        self.believed: dict[str, set[int]] = defaultdict(set)
        #: Of every block that was ever told: its parent, and its tokens.
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.received = self.lost = self.questions = 0

    def listen(self, *, until: Callable[[], bool], seconds: float = 20.0) -> None:
        """Takes what comes until `until` holds."""
        if not self.questions:
            self._ask(0)
        ends = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < ends, dict(self.believed)
            if self._events.poll(20):
                self._take()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _take(self) -> None:
        _topic, number, batch = self._events.recv_multipart()
        told = int.from_bytes(number, "big")
        if self._next is not None and told < self._next:
            return
        self.received += 1
        if self._loses(self.received):
            self.lost += 1
            return
        self._hear(told, batch)

    def _hear(self, number: int, batch: bytes) -> None:
        if self._next is None or number > self._next:
            self._ask(self._next or 0)
        if self._next is None or number >= self._next:
            self._believe(batch)
            self._next = number + 1

    def _ask(self, first: int) -> None:
        self.questions += 1
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(_ANSWER_S * 1000), "no answer"
            _empty, _topic, number, batch = self._replay.recv_multipart()
            told = int.from_bytes(number, "big", signed=True)
            if told == _END:
                return
            self._believe(batch)
            self._next = told + 1

    def _believe(self, batch: bytes) -> None:
        _stamp, events, _rank = msgpack.unpackb(batch)
        for event in events:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                self.believed.clear()
            elif kind == "BlockRemoved":
                self.believed[event["medium"]].difference_update(event["block_hashes"])
            else:
                self._stored(event)

    def _stored(self, event: dict[str, Any]) -> None:
        parent, size, tokens = (
            event["parent_block_hash"],
            event["block_size"],
            event["token_ids"],
        )
        assert len(tokens) == size * len(event["block_hashes"])
        for number, name in enumerate(event["block_hashes"]):
            block = (parent, tuple(tokens[number * size : (number + 1) * size]))
            assert self.blocks.setdefault(name, block) == block
            parent = name
        self.believed[event["medium"]].update(event["block_hashes"])
