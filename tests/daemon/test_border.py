"""What every call passes on its way in: the daemon's state, and the trace it belongs to."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_calls import RawClient, failure, key_of, payload_of, put_stream

from kvtier.transfer.rpc import ADMIN
from kvtier.v1 import admin_pb2, pages_pb2, transfer_pb2

#: The command with a self-test that waits until the file named first is there.
SLOW_START = """
import asyncio, os, sys, time
import kvtier.cli, kvtier.daemon.run as run
self_test = run.self_test
async def slow(node):
    while not os.path.exists(sys.argv[1]):
        await asyncio.sleep(0.01)
    await self_test(node)
run.self_test = slow
sys.exit(kvtier.cli.main(sys.argv[5:]))
"""


def test_calls_are_refused_while_it_starts(make_daemon, base):
    go = base / "go"
    daemon = make_daemon(prefix=(sys.executable, "-c", SLOW_START, str(go))).start(wait=False)
    daemon.wait_logged("host.arena.populated")
    with RawClient(daemon.url) as raw:
        handle, keys = 1, key_of(1)
        opening = transfer_pb2.PutRequest(open=transfer_pb2.PutOpen(handle=handle))
        calls = {
            "OpenNamespace": raw.open,
            "Lookup": lambda: raw.call("Lookup", pages_pb2.LookupRequest(handle=handle, keys=keys)),
            "Put": lambda: raw.put_messages([opening]),
            "Get": lambda: list(
                raw.stream("Get", transfer_pb2.GetRequest(handle=handle, keys=keys))
            ),
            "Delete": lambda: raw.call("Delete", pages_pb2.DeleteRequest(handle=handle, keys=keys)),
            "Pin": lambda: raw.call("Pin", pages_pb2.PinRequest(handle=handle, keys=keys)),
            "Watch": lambda: list(raw.stream("Watch", pages_pb2.WatchRequest())),
            "Verify": lambda: list(
                raw.stream("Verify", admin_pb2.VerifyRequest(tier=2), service=ADMIN)
            ),
        }
        health = health_pb2_grpc.HealthStub(raw.channel)
        check = health_pb2.HealthCheckRequest()
        assert health.Check(check, timeout=10, wait_for_ready=True).status == 2, "NOT_SERVING"
        for name, call in calls.items():
            status, kind, text = failure(call)
            assert (status, kind) == (grpc.StatusCode.UNAVAILABLE, "DaemonUnavailable"), name
            assert "starting" in text, name
        assert raw.status().state == "starting"
        assert raw.capabilities().keys_per_call_max > 0
        go.touch()
        daemon.wait_logged("event=daemon.ready")
        assert list(raw.lookup(raw.open(), [keys]).codes) == [2]
    assert daemon.stop() == 0


def test_a_trace_is_logged_and_changes_nothing(make_daemon):
    daemon = make_daemon("daemon.log_level=debug").start()
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01"
    ids = {name: trace.format(f"{number:016x}") for number, name in enumerate(
        ("Put", "Get", "Lookup"), 1)}  # fmt: skip
    with RawClient(daemon.url) as raw:
        opened = raw.open()

        def all_calls(traces: dict[str, str]) -> None:
            messages = list(put_stream(opened, [(key_of(1), payload_of(1))]))
            messages[0].open.traceparent = traces["Put"]
            assert list(raw.put_messages(messages).codes) in ([1], [2])
            got = raw.get(opened, [key_of(1)], traceparent=traces["Get"])
            assert got.payloads == {0: payload_of(1)}
            hints = pages_pb2.CallHints(traceparent=traces["Lookup"])
            request = pages_pb2.LookupRequest(handle=opened.handle, keys=key_of(1), hints=hints)
            assert list(raw.call("Lookup", request).codes) == [1]

        all_calls(dict.fromkeys(ids, ""))
        all_calls(dict.fromkeys(ids, 'x"\n event=daemon.stopped' * 100))
        assert "rpc.traced" not in daemon.log
        all_calls(ids)
    lines = [line for line in daemon.log.splitlines() if "event=rpc.traced" in line]
    assert len(lines) == 3
    for line, (name, text) in zip(lines, ids.items(), strict=True):
        assert f"rpc={name} traceparent={text}" in line
        assert "level=debug" in line
