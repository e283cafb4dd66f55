"""A writer of the local plane that keeps no rule: every field of a WRITE at random, packets that
are none, and bytes anywhere in the arena. What it does follows from its seed.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections import Counter
from typing import Any, Final

import msgpack
import numpy as np

import kvtier
from kvtier.transfer.local import frames
from kvtier.transfer.local.arena_view import map_arena
from tests.faults.fault_rig import Pages

__all__ = ["HONEST", "Fuzzer"]

#: Numbers of the pages of others.
HONEST: Final = range(400)
_OWN: Final = range(100_000, 100_050)
_SCRIBBLE_BYTES_MAX: Final = 8192
_HELLO: Final = frames.encode(frames.Hello(version=frames.VERSION, client="fuzz", writes=1))


class Fuzzer:
    """`is_noisy`: it writes all over the arena, too."""

    def __init__(
        self,
        kv: kvtier.Connection,
        ns: kvtier.Namespace,
        pages: Pages,
        *,
        seed: int,
        is_noisy: bool,
    ) -> None:
        self._rng = random.Random(seed)
        self._path = kv.capabilities().local_socket
        self._opened = ns._async.opened
        self._pages = pages
        self._is_noisy = is_noisy
        self._arena: Any = None
        self._mine: dict[int, int] = {}  # generation -> slot
        self._newest = 1
        self._said: list[bytes] = []
        self._numbers = 0
        self.seen: Counter[str] = Counter()

    def run(self, seconds: float, writers: int) -> dict[str, int]:
        until = time.monotonic() + seconds
        open_ones = [self._connect() for _ in range(writers)]
        while time.monotonic() < until:
            at = self._rng.randrange(writers)
            if not self._provoke(open_ones[at]):
                open_ones[at].close()
                open_ones[at] = self._connect()
            if self._is_noisy:
                self._scribble()
        for one in open_ones:
            one.close()
        return dict(self.seen)

    def _connect(self) -> socket.socket:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.settimeout(5)
        one.connect(self._path)
        if self._rng.random() < 0.1:
            self.seen["before hello"] += 1
            one.send(self._packet())
            return one
        one.send(_HELLO)
        packet, fds, _, _ = socket.recv_fds(one, frames.FRAME_BYTES_MAX, 2, socket.MSG_CMSG_CLOEXEC)
        if fds and self._arena is None:
            welcome = frames.decode(packet)
            assert isinstance(welcome, frames.Welcome)
            self._arena = map_arena(fds[0], welcome.arena_bytes, writable=True)
        for fd in fds:
            os.close(fd)
        return one

    def _provoke(self, one: socket.socket) -> bool:
        """Sends one packet; whether the daemon still listens to it."""
        packet = self._packet()
        self._said.append(packet)
        try:
            one.send(packet)
            answer = one.recv(frames.FRAME_BYTES_MAX)
        except OSError:
            answer = b""
        if not answer:
            self.seen["cut off"] += 1
            return False
        frame = frames.decode(answer)
        if not isinstance(frame, frames.Written):
            self.seen[getattr(frame, "error", "other")] += 1
            return False
        self.seen["written"] += 1
        for code in frame.codes:
            self.seen[kvtier.PutCode(code).name] += 1
        if frame.follows:
            frame = frames.decode(one.recv(frames.FRAME_BYTES_MAX))
            assert isinstance(frame, frames.Written)
        slots = np.frombuffer(frame.slots, np.uint64).tolist()
        generations = np.frombuffer(frame.generations, np.uint64).tolist()
        self._mine.update(zip(generations, slots, strict=True))
        self._newest = max([self._newest, *generations])
        while len(self._mine) > 200:
            self._mine.pop(next(iter(self._mine)))
        return True

    def _packet(self) -> bytes:
        rng = self._rng
        kind = rng.random()
        if kind < 0.04:
            return rng.randbytes(rng.randrange(1, 300))
        if kind < 0.10 and self._said:
            return rng.choice(self._said[-500:])
        packet = msgpack.packb(self._fields())
        if kind < 0.14:
            broken = bytearray(packet)
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
            return bytes(broken)
        return packet

    def _fields(self) -> dict[str, Any]:
        rng, opened = self._rng, self._opened
        self._numbers += 1
        count = rng.choice([0, 1, 1, 1, 2, 2, 5, 20, 256])
        generations = [self._generation() for _ in range(count)]
        if count > 1 and rng.random() < 0.3:
            generations[-1] = generations[0]
        fields: dict[str, Any] = {
            "kind": int(frames.FrameKind.WRITE),
            "number": self._numbers,
            "session_id": rng.choice([opened.session_id, rng.getrandbits(63)]),
            "namespace": rng.choice([opened.namespace_number] * 6 + [0, 1, 2, rng.getrandbits(32)]),
            "shard": rng.choice([0] * 9 + [rng.getrandbits(16)]),
            "length": rng.choice([self._pages.page_bytes] * 7 + [*self._lengths()]),
            "keys": b"".join(self._key() for _ in range(count)),
            "parents": b"".join(self._key() for _ in range(count)),
            "depths": rng.randbytes(4 * count),
            "sums": rng.randbytes(16 * count),
            "generations": np.array(generations, np.uint64).tobytes(),
            "session": rng.choice(["", "s", "\0", "é" * 10]),
            "ttl_ms": rng.choice([0, 1, 2**32 - 1]),
            "priority": rng.choice([0, -(2**31), 2**31 - 1]),
            "known": b"".join(self._key() for _ in range(rng.choice([0, 0, 1, 100]))),
            "returned": np.array(
                [self._generation() for _ in range(rng.choice([0, 0, 1, 30]))], np.uint64
            ).tobytes(),
            "wanted": rng.choice([0, 1, 4, 4, 1024]),
        }
        if rng.random() < 0.6:
            right = self._right(count)
            if rng.random() < 0.5:
                del right[rng.choice(list(right))]
            fields |= right  # all is right but for keys and sums, or one thing more is wrong
        if rng.random() < 0.06:
            name = rng.choice(list(fields))
            fields[name] = rng.choice([-1, 2**64 - 1, None, "x", b"", b"xyz", [], True])
        return fields

    def _right(self, count: int) -> dict[str, Any]:
        mine = [self._mine.popitem()[0] for _ in range(min(count, len(self._mine)))]
        mine += [1] * (count - len(mine))
        return {
            "namespace": self._opened.namespace_number,
            "shard": 0,
            "length": self._pages.page_bytes,
            "generations": np.array(mine, np.uint64).tobytes(),
            "returned": b"",
            "wanted": 4,
        }

    def _lengths(self) -> list[int]:
        right = self._pages.page_bytes
        return [right - 1, right + 1, 0, 1, 2**40, self._rng.randrange(1 << 20)]

    def _generation(self) -> int:
        kind = self._rng.random()
        if kind < 0.7 and self._mine:
            mine = self._rng.choice(list(self._mine))
            if self._rng.random() < 0.8:
                del self._mine[mine]
            return mine
        if kind < 0.9:  # close to what others were granted
            return max(0, self._newest + self._rng.randrange(-50, 50))
        return self._rng.getrandbits(64)

    def _key(self) -> bytes:
        kind = self._rng.random()
        if kind < 0.3:
            return self._pages.key(self._rng.choice(HONEST))
        return bytes(32) if kind < 0.4 else self._pages.key(self._rng.choice(_OWN))

    def _scribble(self) -> None:
        if self._arena is None:
            return
        length = self._rng.randrange(1, _SCRIBBLE_BYTES_MAX)
        at = self._rng.randrange(len(self._arena) - length)
        self._arena[at : at + length] = np.frombuffer(self._rng.randbytes(length), np.uint8)
        self.seen["scribbles"] += 1
