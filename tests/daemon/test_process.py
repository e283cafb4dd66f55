"""The life of the real process: who may start, what stays, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from raw_calls import RawClient, error_of, key_of, payload_of, put_page, put_stream

from kvtier.testing.daemon_process import DaemonNotReady
from kvtier.transfer.rpc import ADMIN
from kvtier.v1 import admin_pb2, transfer_pb2


def refused(make, *settings: str, name: str = "", code: int) -> str:
    """Starts a daemon that must not start; what it says. It ends by itself with `code`."""
    daemon = make(*settings, name=name)
    before = len(daemon.log)
    daemon.start(wait=False)
    assert daemon.wait() == code
    said = daemon.log[before:]
    assert "Traceback" not in said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert f"\n{errors[0]}\nremedy: " in "\n" + said
    return errors[0]


# -- start and stop -------------------------------------------------------------------------------


def test_ready_within_two_seconds_and_a_clean_end(make_daemon):
    daemon = make_daemon("host.bytes=1GiB").start()
    seconds = float(daemon.log.split(" seconds=")[1].split()[0])
    assert seconds < 2.0, daemon.log
    assert daemon.log.index("selftest.passed tier=host") < daemon.log.index("daemon.ready")
    assert daemon.log.index("selftest.passed plane=grpc") < daemon.log.index("daemon.ready")
    assert daemon.stop() == 0
    assert daemon.log.count("event=daemon.stopped") == 1
    assert "Traceback" not in daemon.log
    assert not daemon.socket.exists()


def test_the_self_test_leaves_nothing(client):
    status = client.status()
    assert status.state == "ready"
    host = status.tiers[0]
    assert (host.pages_sealed, host.pages_quarantined, host.used_bytes) == (0, 0, 0)
    assert not status.sessions
    assert not status.namespaces
    assert not any(status.counters.values()), dict(status.counters)
    assert not status.warnings


def test_sigterm_lets_a_put_finish(make_daemon):
    daemon = make_daemon().start()
    with RawClient(daemon.url) as raw:
        opened = raw.open()
        payload = payload_of("slow")
        go = []

        def messages():
            yield transfer_pb2.PutRequest(
                open=transfer_pb2.PutOpen(handle=opened.handle),
                pages=[put_page(opened, key_of("slow"), payload)],
                data=payload[:100],
            )
            wait_filling(raw)
            daemon.signal(signal.SIGTERM)
            daemon.wait_logged("event=daemon.draining")
            go.append(refusal(raw))
            yield transfer_pb2.PutRequest(offset=100, data=payload[100:])

        answer = raw.put_messages(messages())
        assert list(answer.codes) == [1]
        assert go == [(grpc.StatusCode.UNAVAILABLE, "DaemonUnavailable")]
    assert daemon.wait() == 0


def wait_filling(raw: RawClient) -> None:
    """Until a put is under way: what has not reached the daemon is not."""
    deadline = time.monotonic() + 20
    while not raw.status().tiers[0].pages_filling:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refusal(raw: RawClient):
    try:
        raw.open()
    except grpc.RpcError as error:
        return error_of(error)[:2]
    return None


def test_sigterm_ends_at_its_deadline_with_a_put_that_hangs(make_daemon):
    daemon = make_daemon("daemon.drain_deadline_s=0.3").start()
    with RawClient(daemon.url) as raw:
        opened = raw.open()

        def messages():
            yield transfer_pb2.PutRequest(
                open=transfer_pb2.PutOpen(handle=opened.handle),
                pages=[put_page(opened, key_of(1), payload_of(1))],
                data=payload_of(1)[:100],
            )
            wait_filling(raw)
            daemon.signal(signal.SIGTERM)
            daemon.wait(10)
            return

        began = time.monotonic()
        with pytest.raises(grpc.RpcError):
            raw.put_messages(messages())
    assert daemon.wait() == 0
    assert time.monotonic() - began < 5


def test_a_second_signal_ends_it_at_once(make_daemon):
    daemon = make_daemon("daemon.drain_deadline_s=60").start()
    with RawClient(daemon.url) as raw:
        opened = raw.open()

        def messages():
            yield transfer_pb2.PutRequest(
                open=transfer_pb2.PutOpen(handle=opened.handle),
                pages=[put_page(opened, key_of(1), payload_of(1))],
                data=payload_of(1)[:100],
            )
            wait_filling(raw)
            daemon.signal(signal.SIGINT)
            daemon.wait_logged("event=daemon.draining")
            daemon.signal(signal.SIGINT)
            daemon.wait(10)
            return

        with pytest.raises(grpc.RpcError):
            raw.put_messages(messages())
    assert daemon.wait() == 1


def test_drain_by_call_says_what_is_lost(daemon, client):
    opened = client.open()
    client.put(opened, [(key_of(i), payload_of(i)) for i in range(3)])
    answer = client.call("Drain", admin_pb2.DrainRequest(deadline_ms=2000), service=ADMIN)
    assert answer.pages_lost == 3
    assert daemon.wait() == 0


# -- restarts -------------------------------------------------------------------------------------


def test_sigkill_and_restart(make_daemon):
    daemon = make_daemon().start()
    with RawClient(daemon.url) as raw:
        opened = raw.open()
        put = raw.put(opened, [(key_of(1), payload_of(1))])
        assert list(put.codes) == [1]
        first = put.generations[0]
    daemon.kill()
    assert daemon.socket.exists(), "a killed daemon leaves its socket behind"
    daemon.start()
    with RawClient(daemon.url) as raw:
        with pytest.raises(grpc.RpcError) as caught:
            raw.lookup(opened, [key_of(1)])
        assert error_of(caught.value)[:2] == (grpc.StatusCode.NOT_FOUND, "UnknownHandle")
        again = raw.open()
        assert again.boot_id != opened.boot_id
        assert again.generation == opened.generation
        assert list(raw.lookup(again, [key_of(1)]).codes) == [2], "host memory went with it"
        put = raw.put(again, [(key_of(1), payload_of(1))])
        assert put.generations[0] > first


def test_the_journal_is_written_before_its_numbers_are_used(make_daemon):
    """Every start goes on above everything that the start before could have used."""
    daemon = make_daemon()
    seen = [0]
    for _ in range(3):
        daemon.start()
        with RawClient(daemon.url) as raw:
            opened = raw.open()
            put = raw.put(opened, [(key_of(1), payload_of(1))])
            seen.append(put.generations[0])
        daemon.kill()
    assert seen[1] < seen[2] < seen[3]
    assert seen[2] - seen[1] >= 1 << 20


def test_a_damaged_directory_stops_the_start(make_daemon):
    daemon = make_daemon().start()
    daemon.stop()
    (daemon.directory / "generations").write_bytes(b"x" * 48)
    assert "generations is damaged" in refused(make_daemon, code=1)


def test_two_daemons_on_one_directory(make_daemon):
    first = make_daemon().start()
    said = refused(make_daemon, f"daemon.directory={first.directory}", name="second", code=1)
    assert f"in use by the daemon with pid {first.pid}" in said
    assert str(first.directory) in said
    with RawClient(first.url) as raw:
        assert raw.status().state == "ready"


def test_two_daemons_on_one_socket(make_daemon):
    first = make_daemon().start()
    said = refused(make_daemon, f"daemon.listen={first.url}", name="second", code=2)
    assert "another process answers at this socket" in said
    assert "(--set daemon.listen)" in said
    with RawClient(first.url) as raw:
        assert raw.status().state == "ready"


def test_two_daemons_on_one_port(make_daemon):
    first = make_daemon("daemon.listen=grpc://127.0.0.1:0")
    first.start()
    url = first.log.split("event=daemon.ready listen=")[1].split()[0]
    assert not url.endswith(":0")
    said = refused(make_daemon, f"daemon.listen={url}", name="second", code=2)
    assert "cannot be bound" in said
    with RawClient(url) as raw:
        assert raw.status().listen == [url]


def test_something_else_at_the_sockets_path(make_daemon):
    daemon = make_daemon()
    daemon.socket.parent.mkdir(mode=0o700)
    daemon.socket.write_text("mine")
    assert "is not a socket" in refused(make_daemon, code=2)
    assert daemon.socket.read_text() == "mine"


def test_a_live_foreign_socket_is_not_taken(make_daemon):
    daemon = make_daemon()
    daemon.socket.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(daemon.socket))
        other.listen()
        assert "another process answers" in refused(make_daemon, code=2)
        assert stat.S_ISSOCK(daemon.socket.lstat().st_mode)


def test_a_sockets_directory_that_others_can_enter(make_daemon):
    daemon = make_daemon()
    daemon.socket.parent.mkdir()
    daemon.socket.parent.chmod(0o755)
    assert "is not private" in refused(make_daemon, code=2)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_permissions_do_not_depend_on_the_umask(make_daemon, umask):
    daemon = make_daemon(umask=umask).start()
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(daemon.socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(daemon.directory.stat().st_mode) == 0o700
    for item in daemon.directory.iterdir():
        assert stat.S_IMODE(item.stat().st_mode) & 0o077 == 0, item


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_cannot_connect(daemon):
    for path in (daemon.base, daemon.socket.parent):
        path.chmod(0o755)  # so that the socket's own mode is what refuses
    code = (
        "import os, socket, sys\nos.setuid(65534)\n"
        "try:\n    socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
        "except PermissionError:\n    sys.exit(13)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(daemon.socket)]).returncode == 13


# -- what does not fit ----------------------------------------------------------------------------


def test_a_metrics_address_that_is_none(make_daemon):
    said = refused(make_daemon, "host.bytes=1MiB", "daemon.metrics_listen=127.0.0.1:x", code=2)
    assert "daemon.metrics_listen" in said


def test_metrics_port_in_use(make_daemon):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = refused(make_daemon, f"daemon.metrics_listen=127.0.0.1:{port}", code=2)
    assert f'daemon.metrics_listen = "127.0.0.1:{port}"' in said


def namespaces_work() -> bool:
    return subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not namespaces_work(), reason="user namespaces are off here")
def test_a_small_dev_shm_does_not_matter(make_daemon):
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    prefix = ("unshare", "-Urm", "sh", "-c", script, "sh")
    daemon = make_daemon("host.bytes=256MiB", prefix=prefix).start()
    daemon.wait_logged("event=host.arena.populated")
    with RawClient(daemon.url) as raw:
        opened = raw.open()
        pages = [(key_of(i), payload_of(i, 1 << 16)) for i in range(64)]
        assert list(raw.put(opened, pages).codes) == [1] * 64
    assert daemon.stop() == 0


def test_a_wrong_value_stops_the_start(make_daemon):
    daemon = make_daemon("host.bytes=banana")
    with pytest.raises(DaemonNotReady, match=r"host\.bytes = 'banana'"):
        daemon.start()


# -- health, reflection, metrics ------------------------------------------------------------------


def test_health_follows_the_state(make_daemon):
    daemon = make_daemon("daemon.drain_deadline_s=5").start()
    with RawClient(daemon.url) as raw:
        stub = health_pb2_grpc.HealthStub(raw.channel)
        for service in ("", "kvtier.v1.Pages", "kvtier.v1.Admin"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
        opened = raw.open()

        def messages():
            yield from put_stream(opened, [(key_of(1), payload_of(1))])
            deadline = time.monotonic() + 5
            while list(raw.lookup(opened, [key_of(1)]).codes) != [1]:  # until the put is under way
                assert time.monotonic() < deadline
            daemon.signal(signal.SIGTERM)
            daemon.wait_logged("event=daemon.draining")
            time.sleep(0.1)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            states.append((answer.status, raw.status().state))

        states: list[tuple[int, str]] = []
        raw.put_messages(messages())
        assert states == [(health_pb2.HealthCheckResponse.NOT_SERVING, "draining")]


def test_reflection_lists_the_services(client):
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=5)))
    names = {service.name for service in answer.list_services_response.service}
    assert {"kvtier.v1.Pages", "kvtier.v1.Admin", "grpc.health.v1.Health"} <= names


def test_metrics_are_served_and_agree_with_status(make_daemon):
    daemon = make_daemon("daemon.metrics_listen=127.0.0.1:0").start()
    url = daemon.log.split(" metrics=")[1].split()[0]
    with RawClient(daemon.url) as raw:
        opened = raw.open()
        raw.put(opened, [(key_of(i), payload_of(i)) for i in range(4)])
        raw.get(opened, [key_of(0), key_of("none")])
        raw.lookup(opened, [key_of(0), key_of("none"), key_of("nothing")])
        text = urllib.request.urlopen(url, timeout=5).read().decode()
        counters = dict(raw.status().counters)
    for line in (
        'kvtier_put_pages_total{code="stored"} 4.0',
        'kvtier_get_pages_total{code="hit"} 1.0',
        'kvtier_get_pages_total{code="miss"} 1.0',
        'kvtier_lookup_keys_total{result="hit"} 1.0',
        'kvtier_lookup_keys_total{result="miss"} 2.0',
        'kvtier_pages_total{event="stored"} 4.0',
        'kvtier_tier_pages{state="sealed",tier="host"} 4.0',
        'kvtier_rpcs_total{rpc="Put",status="OK"} 1.0',
        "kvtier_ready 1.0",
        "kvtier_received_bytes_total 262144.0",
    ):
        assert line in text, line
    assert (counters["stored"], counters["lookup_hits"], counters["get_miss"]) == (4, 1, 1)
