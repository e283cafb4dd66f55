"""The control socket of the local plane by itself: who gets the descriptors, and who is cut off."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from kvtier.daemon import local_server
from kvtier.daemon.local_server import LocalServer, Offer
from kvtier.errors import InvalidConfigValue
from kvtier.transfer.local.frames import (
    FRAME_BYTES_MAX,
    VERSION,
    Hello,
    Refused,
    Used,
    Welcome,
    decode,
    encode,
)

WELCOME = Welcome(version=VERSION, boot_id=7, arena_bytes=4096)
HELLO = encode(Hello(version=VERSION, client="test"))


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


class Rig:
    def __init__(self, home: Path) -> None:
        self.heard: list[Used] = []
        self.fds = [os.memfd_create(name) for name in ("arena", "directory")]
        offer = Offer(welcome=WELCOME, arena_fd=self.fds[0], directory_fd=self.fds[1])
        path = home / "sockets" / "local.sock"
        self.server = LocalServer(path, offer, self.heard.append, lambda: None, clients_max=4)
        self.server.start(refuse)

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.settimeout(5)
        client.connect(str(self.server.path))
        return client

    def attach(self) -> socket.socket:
        client = self.connect()
        client.send(HELLO)
        packet, fds, _, _ = socket.recv_fds(client, FRAME_BYTES_MAX, 4)
        assert decode(packet) == WELCOME
        ours = [os.fstat(fd).st_ino for fd in self.fds]
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
        encode(Hello(version=VERSION + 1, client="newer")),
        HELLO + bytes(FRAME_BYTES_MAX),
    ],
    ids=["no msgpack", "unknown", "before hello", "not a client's", "version", "too long"],
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


def test_an_end_is_seen_by_every_client(rig: Rig) -> None:
    with rig.attach() as client, rig.connect() as silent:
        rig.server.close()
        assert client.recv(1) == b""
        assert silent.recv(1) == b""
        assert not rig.server.path.exists()
        rig.close = lambda: [os.close(fd) for fd in rig.fds]


def test_a_path_that_is_taken_is_refused(rig: Rig, tmp_path: Path) -> None:
    offer = Offer(welcome=WELCOME, arena_fd=rig.fds[0], directory_fd=rig.fds[1])
    second = LocalServer(rig.server.path, offer, rig.heard.append, lambda: None, clients_max=4)
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
