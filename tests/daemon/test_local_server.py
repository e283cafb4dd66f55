"""The control socket of the local plane by itself: who gets the descriptors, and who is cut off."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from kvtier.daemon import local_server
from kvtier.daemon.local_server import LocalServer, Offer
from kvtier.errors import DaemonUnavailable, InvalidConfigValue
from kvtier.transfer.local.frames import (
    FRAME_BYTES_MAX,
    VERSION,
    Hello,
    Refused,
    Used,
    Welcome,
    Write,
    Written,
    decode,
    encode,
)

WELCOME = Welcome(version=VERSION, boot_id=7, arena_bytes=4096)
WRITER = encode(Hello(version=VERSION, client="writer", writes=1))
HELLO = encode(Hello(version=VERSION, client="test", writes=0))


def used(number: int = 1) -> Used:
    return Used(
        namespace=number,
        shard=0,
        keys=bytes(32),
        lookup_hits=1,
        lookup_misses=0,
        get_hits=0,
        get_misses=0,
        get_bytes=0,
    )


def refuse(reason: str, remedy: str) -> InvalidConfigValue:
    return InvalidConfigValue(reason, remedy=remedy)


def write(number: int = 1) -> Write:
    return Write(
        number=number,
        session_id=1,
        namespace=1,
        shard=0,
        length=4096,
        keys=b"",
        parents=b"",
        depths=b"",
        sums=b"",
        generations=b"",
        session="",
        ttl_ms=0,
        priority=0,
        known=b"",
        returned=b"",
        wanted=0,
    )


class Writes:
    """Remembers what it is told. A holder has something left while it is in `holding`."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.holding: set[int] = set()
        self.refuses = False

    def write(self, holder: int, frame: Write) -> Iterator[Written]:
        if self.refuses:
            raise DaemonUnavailable("draining", remedy="wait")
        self.told.append(("write", holder))
        self.holding.add(holder)
        yield Written(
            number=frame.number, codes=b"", slots=b"", generations=b"", grant_ms=100, follows=0
        )

    def expire(self) -> None:
        self.told.append(("expire", 0))

    def ended(self, holder: int) -> bool:
        self.told.append(("ended", holder))
        return holder in self.holding

    def exited(self, holder: int) -> None:
        self.told.append(("exited", holder))

    def undelivered(self, holder: int, answer: Written) -> None:
        self.told.append(("undelivered", holder))

    def of(self, holder: int) -> list[str]:
        return [what for what, who in self.told if who == holder]


class Rig:
    def __init__(self, home: Path) -> None:
        self.heard: list[Used] = []
        self.writes = Writes()
        self.fds = [os.memfd_create(name) for name in ("arena", "directory", "writable")]
        self.path = home / "sockets" / "local.sock"
        self.server = self.make_server()
        self.server.start(refuse)

    def make_server(self) -> LocalServer:
        arena, directory, writable = self.fds
        offer = Offer(welcome=WELCOME, arena_fd=arena, directory_fd=directory, writable_fd=writable)
        return LocalServer(
            self.path, offer, self.heard.append, lambda: None, self.writes, connections_max=4
        )

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.settimeout(5)
        client.connect(str(self.server.path))
        return client

    def attach(self, hello: bytes = HELLO) -> socket.socket:
        client = self.connect()
        client.send(hello)
        packet, fds, _, _ = socket.recv_fds(client, FRAME_BYTES_MAX, 4)
        assert decode(packet) == WELCOME
        given = self.fds[:2] if hello is HELLO else self.fds[2:]
        ours = [os.fstat(fd).st_ino for fd in given]
        assert [os.fstat(fd).st_ino for fd in fds] == ours
        for fd in fds:
            os.close(fd)
        return client

    def wait(self, is_so) -> None:
        deadline = time.monotonic() + 5
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def close(self) -> None:
        self.server.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def greeting(rig: Rig) -> socket.socket:
    """A client that has said hello."""
    client = rig.connect()
    client.send(HELLO)
    return client


def refusal(client: socket.socket) -> Refused:
    """What the server says before it cuts the client off."""
    frame = decode(client.recv(FRAME_BYTES_MAX))
    assert isinstance(frame, Refused)
    assert client.recv(FRAME_BYTES_MAX) == b""
    client.close()
    return frame


def test_a_client_gets_both_descriptors_and_is_heard(rig: Rig) -> None:
    with rig.attach() as client, rig.attach():
        assert rig.server.attached == 2
        for number in range(100):
            client.send(encode(used(number)))
        rig.wait(lambda: len(rig.heard) == 100)
        assert [frame.namespace for frame in rig.heard] == list(range(100))
    rig.wait(lambda: rig.server.attached == 0)


def test_the_socket_is_private(rig: Rig) -> None:
    assert stat.S_IMODE(rig.server.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(rig.server.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "packet",
    [
        b"\xc1",
        msgpack.packb({"kind": 99}),
        encode(used()),
        encode(WELCOME),
        encode(Hello(version=VERSION + 1, client="newer", writes=0)),
        HELLO + bytes(FRAME_BYTES_MAX),
        encode(write()),
    ],
    ids=["no msgpack", "unknown", "before hello", "not a client's", "version", "too long", "write"],
)
def test_a_broken_rule_ends_that_connection_alone(rig: Rig, packet: bytes) -> None:
    with rig.attach() as other:
        client = rig.connect()
        client.send(packet)
        refused = refusal(client)
        assert refused.error == "InvalidFrame"
        assert refused.remedy
        other.send(encode(used()))
        rig.wait(lambda: len(rig.heard) == 1)


def test_a_second_hello_is_out_of_turn(rig: Rig) -> None:
    client = rig.attach()
    client.send(HELLO)
    assert "out of turn" in refusal(client).message


def test_more_clients_than_the_limit_are_refused_and_room_comes_back(rig: Rig) -> None:
    clients = [rig.attach() for _ in range(4)]
    assert "sessions_max" in refusal(greeting(rig)).message
    clients.pop().close()
    rig.wait(lambda: rig.server.attached == 3)
    clients.append(rig.attach())
    for client in clients:
        client.close()


def test_another_user_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server.os, "geteuid", lambda: 12345)
    for _ in range(50):
        assert "uid" in refusal(greeting(rig)).message


def test_who_says_nothing_is_cut_off(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "_HELLO_S_MAX", 0.05)
    with rig.attach() as attached, rig.connect() as silent:
        assert silent.recv(1) == b""
        attached.send(encode(used()))
        rig.wait(lambda: len(rig.heard) == 1)


def test_one_that_never_stops_does_not_keep_others_waiting(rig: Rig) -> None:
    with rig.attach() as loud:
        loud.setblocking(False)
        packet = encode(used())
        for _ in range(50):
            try:
                while True:
                    loud.send(packet)
            except BlockingIOError:
                pass
            rig.attach().close()


# -- writers ------------------------------------------------------------------------------------


def test_a_writer_gets_the_arena_alone_and_is_answered(rig: Rig) -> None:
    with rig.attach() as reader, rig.attach(WRITER) as writer:
        assert (rig.server.attached, rig.server.writers) == (1, 1)
        for number in range(3):
            writer.send(encode(write(number)))
            answer = decode(writer.recv(FRAME_BYTES_MAX))
            assert isinstance(answer, Written)
            assert answer.number == number
        reader.send(encode(write()))
        assert "out of turn" in refusal(reader).message
        writer.send(encode(used()))
        assert "out of turn" in refusal(writer).message


def test_what_a_writer_holds_is_kept_back_until_its_process_has_ended(rig: Rig) -> None:
    go, gone = os.pipe()
    child = os.fork()
    if not child:
        os.close(gone)
        writer = rig.attach(WRITER)
        writer.send(encode(write()))
        writer.recv(FRAME_BYTES_MAX)
        writer.close()
        os.read(go, 1)
        os._exit(0)
    os.close(go)
    try:
        rig.wait(lambda: rig.writes.of(1) == ["write", "ended"])
        rig.wait(lambda: ("expire", 0) in rig.writes.told)
        assert rig.server.writers == 0
    finally:
        os.close(gone)
        os.waitpid(child, 0)
    rig.wait(lambda: rig.writes.of(1) == ["write", "ended", "exited"])
    with rig.attach(WRITER):
        assert rig.server.writers == 1


def test_a_writer_that_holds_nothing_is_forgotten_with_its_connection(rig: Rig) -> None:
    rig.attach(WRITER).close()
    rig.wait(lambda: rig.writes.of(1) == ["ended"])
    time.sleep(0.05)
    assert rig.writes.of(1) == ["ended"]


def test_a_writer_that_is_killed_has_exited(rig: Rig) -> None:
    child = os.fork()
    if not child:
        writer = rig.attach(WRITER)
        writer.send(encode(write()))
        writer.recv(FRAME_BYTES_MAX)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    rig.wait(lambda: rig.writes.of(1) == ["write", "ended", "exited"])


def test_what_a_writer_said_before_it_went_is_heard(rig: Rig) -> None:
    """Also when answers were not read, or can no longer be sent."""
    for holder in range(1, 9):
        writer = rig.attach(WRITER)
        for number in range(5):
            writer.send(encode(write(number)))
        writer.close()
        rig.wait(lambda holder=holder: "ended" in rig.writes.of(holder))
        told = [what for what in rig.writes.of(holder) if what != "undelivered"]
        assert told == ["write"] * 5 + ["ended"]


def test_a_refused_write_ends_the_writer(rig: Rig) -> None:
    rig.writes.refuses = True
    writer = rig.attach(WRITER)
    writer.send(encode(write()))
    assert refusal(writer).error == "DaemonUnavailable"
    rig.wait(lambda: rig.writes.of(1) == ["ended"])


def test_a_writer_that_does_not_read_its_answers_is_cut_off(rig: Rig) -> None:
    with rig.attach(WRITER) as writer:
        writer.settimeout(5)
        with pytest.raises(ConnectionError):
            for number in range(100_000):
                writer.send(encode(write(number)))
    rig.wait(lambda: "ended" in rig.writes.of(1))


def test_a_process_that_cannot_be_watched_does_not_write(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwatched(peer: socket.socket) -> int:
        raise OSError(errno.ESRCH, "it is in another pid namespace")

    monkeypatch.setattr(local_server, "_pidfd_of", unwatched)
    client = rig.connect()
    client.send(WRITER)
    assert "cannot be watched" in refusal(client).message
    rig.attach().close()


def test_a_kernel_without_peer_pidfds_watches_the_pid(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "_SO_PEERPIDFD", 9999)
    child = os.fork()
    if not child:
        writer = rig.attach(WRITER)
        writer.send(encode(write()))
        writer.recv(FRAME_BYTES_MAX)
        os._exit(0)
    os.waitpid(child, 0)
    rig.wait(lambda: rig.writes.of(1) == ["write", "ended", "exited"])


def test_an_end_is_seen_by_every_client(rig: Rig) -> None:
    with rig.attach() as client, rig.connect() as silent:
        rig.server.close()
        assert client.recv(1) == b""
        assert silent.recv(1) == b""
        assert not rig.server.path.exists()
        rig.close = lambda: [os.close(fd) for fd in rig.fds]


def test_a_path_that_is_taken_is_refused(rig: Rig, tmp_path: Path) -> None:
    second = rig.make_server()
    with pytest.raises(InvalidConfigValue):
        second.start(refuse)
    second.close()
    rig.attach().close()


def test_a_socket_that_a_killed_daemon_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "sockets" / "local.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(path))
    rig = Rig(tmp_path)
    rig.attach().close()
    rig.close()
