"""Where KV events are served, and what those get who ask: sockets without a daemon."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
from event_rig import free_endpoints
from event_router import zmq

from kvtier.errors import InvalidConfigValue
from kvtier_sglang.events.outlet import Endpoints, Outlet


def answer(outlet, whole):
    for question in outlet.questions():
        if not outlet.answer_kept(question):
            outlet.answer(question, whole)


@pytest.mark.parametrize("kept", [0, 2, 4, 5])
def test_who_asks_gets_what_is_missing_or_all(tmp_path, kept):
    """Batches from the first wanted on, where all of them are kept; else what holds, numbered so
    that the next one follows. `kept` is how many of the five are wanted.
    """
    endpoints = Endpoints(events=f"ipc://{tmp_path}/e", replay=f"ipc://{tmp_path}/r", topic="kv")
    outlet = Outlet(endpoints)
    context = zmq.Context()
    try:
        assert stat.S_IMODE(Path(tmp_path, "e").stat().st_mode) == 0o600
        for number in range(5):
            outlet.publish(b"%d" % number)
        latest = outlet._number
        router = context.socket(zmq.DEALER)
        router.connect(endpoints.replay)

        def ask(first):
            router.send_multipart([b"", first.to_bytes(8, "big")])
            told_of = []
            while True:
                if not router.poll(10):
                    answer(outlet, [b"clear", b"all"])
                    continue
                empty, topic, number, batch = router.recv_multipart()
                assert empty == b""
                told_of.append((int.from_bytes(number, "big", signed=True), batch))
                if told_of[-1] == (-1, b""):
                    return told_of[:-1]
                assert topic == b"kv"

        wanted = ask(latest + 1 - kept)
        assert [batch for _, batch in wanted] == [b"%d" % i for i in range(5 - kept, 5)]
        assert [number for number, _ in wanted] == list(range(latest + 1 - kept, latest + 1))
        assert ask(latest - 5) == ask(0) == [(latest - 1, b"clear"), (latest, b"all")]
        assert ask(latest + 2) == ask(0), "of another publisher"
    finally:
        context.destroy(linger=0)
        outlet.close()


def test_a_question_that_makes_no_sense_is_passed_over(tmp_path):
    endpoints = Endpoints(events=f"ipc://{tmp_path}/e", replay=f"ipc://{tmp_path}/r")
    outlet = Outlet(endpoints)
    context = zmq.Context()
    try:
        router = context.socket(zmq.DEALER)
        router.connect(endpoints.replay)
        for frames in ([b"x"], [b"", b"short"], [b"", b"", b"", b""], [b"", bytes(8)]):
            router.send_multipart(frames)
        while not router.poll(10):
            answer(outlet, [b"all"])
        assert router.recv_multipart()[3] == b"all"
    finally:
        context.destroy(linger=0)
        outlet.close()


@pytest.mark.parametrize(
    ("endpoint", "dp_rank", "bound"),
    [
        ("tcp://127.0.0.1:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://localhost:5557", 2, "tcp://localhost:5559"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("ipc:///run/e", 0, "ipc:///run/e"),
        ("ipc:///run/e", 3, "ipc:///run/e_dp3"),
        ("tcp://*:5557", 0, None),
        ("tcp://0.0.0.0:5557", 0, None),
        ("tcp://10.0.0.1:5557", 0, None),
        ("tcp://example.org:5557", 0, None),
    ],
)
def test_where_events_may_be_served(endpoint, dp_rank, bound):
    endpoints = Endpoints(events=endpoint)
    if bound is None:
        with pytest.raises(InvalidConfigValue, match="other machines"):
            endpoints.checked(allows_network=False, dp_rank=dp_rank)
    made = endpoints.checked(allows_network=True, dp_rank=dp_rank)
    assert made.events == (bound or endpoint)


@pytest.mark.parametrize("endpoint", ["5557", "udp://127.0.0.1:1", "tcp://127.0.0.1", "tcp://:x"])
def test_what_is_no_endpoint_is_refused(endpoint):
    with pytest.raises(InvalidConfigValue, match="kvtier_events_replay_endpoint"):
        Endpoints(events="tcp://127.0.0.1:1", replay=endpoint).checked(
            allows_network=True, dp_rank=0
        )


def test_an_address_that_is_taken_is_an_error_that_says_so():
    endpoints = free_endpoints()
    outlet = Outlet(endpoints)
    try:
        with pytest.raises(InvalidConfigValue, match="cannot be served"):
            Outlet(endpoints)
    finally:
        outlet.close()
    Outlet(endpoints).close()


def test_a_path_that_another_one_serves_is_refused(tmp_path):
    """ZeroMQ would take it over, and nobody would hear of it."""
    endpoints = Endpoints(events=f"ipc://{tmp_path}/e", replay=f"ipc://{tmp_path}/r")
    outlet = Outlet(endpoints)
    try:
        for other in (endpoints, Endpoints(events=f"ipc://{tmp_path}/n", replay=endpoints.events)):
            with pytest.raises(InvalidConfigValue, match="another process serves it"):
                Outlet(other)
    finally:
        outlet.close()
    Path(tmp_path, "e").touch()  # as one that was killed leaves it
    Outlet(endpoints).close()
    with socket.socket(socket.AF_UNIX) as others:
        others.bind(f"{tmp_path}/x")
        others.listen()
        with pytest.raises(InvalidConfigValue, match="another process serves it"):
            Outlet(Endpoints(events=f"ipc://{tmp_path}/x"))


def test_a_path_belongs_to_its_owner_from_the_beginning(tmp_path, monkeypatch):
    modes, umask = [], os.umask(0o022)
    chmod = Path.chmod

    def seen(path, mode):
        modes.append(stat.S_IMODE(path.stat().st_mode))
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", seen)
    try:
        Outlet(Endpoints(events=f"ipc://{tmp_path}/e", replay=f"ipc://{tmp_path}/r")).close()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(umask)
    assert [mode & 0o077 for mode in modes] == [0, 0]


@pytest.mark.parametrize(("replay", "fits"), [(5557, 0), (5558, 1), (5556, 1), (5560, 3)])
def test_replicas_with_ports_of_each_other_are_refused(replay, fits):
    endpoints = Endpoints(events="tcp://127.0.0.1:5557", replay=f"tcp://127.0.0.1:{replay}")
    for rank in range(fits):
        endpoints.checked(allows_network=False, dp_rank=rank)
    with pytest.raises(InvalidConfigValue, match=f"replica {fits} of data parallelism"):
        endpoints.checked(allows_network=False, dp_rank=fits)
