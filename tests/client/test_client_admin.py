"""Verify, quarantine and devices: what whoever looks after a daemon asks of it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import kvtier
from kvtier.client import DeviceStatus, QuarantinedPage, VerifyProgress
from kvtier.core.page import Codec, PageRef, Tier
from kvtier.v1 import admin_pb2
from tests.client.test_client_failures import within
from tests.client.test_client_process import run_script

RECORD = bytes(range(256)) * 48  # header block and two more, in three messages
NOTHING = VerifyProgress(pages_done=0, pages_total=0, bytes_done=0, pages_corrupt=0)


def report(done, corrupt=0):
    return {
        "pages_done": done,
        "pages_total": 3,
        "bytes_done": done << 20,
        "pages_corrupt": corrupt,
    }


@pytest.fixture
def reports(daemon):
    made = [report(1), report(2, 1), report(3, 1)]
    daemon.tiers.reports = [admin_pb2.VerifyProgress(**fields) for fields in made]
    return [VerifyProgress(**fields) for fields in made]


def comes(check, seconds=5.0):
    limit = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < limit
        time.sleep(0.01)


# -- verify ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["nvme", Tier.NVME])
def test_verify(kv, daemon, reports, tier):
    seen, threads = [], set()

    def on_progress(progress):
        seen.append(progress)
        threads.add(threading.current_thread())

    assert kv.verify(tier, bytes_per_second=5 << 20, on_progress=on_progress) == reports[-1]
    assert seen == reports
    assert threads == {threading.current_thread()}
    assert daemon.tiers.verifies == [(Tier.NVME, 5 << 20)]
    assert kv.verify("host") == reports[-1]
    daemon.tiers.reports = []
    assert kv.verify("host") == NOTHING


def test_the_callback_may_call_the_connection_and_may_raise(kv, daemon, reports):
    assert kv.verify("host", on_progress=lambda _: kv.ping()) == reports[-1]
    daemon.tiers.silent_after = 2

    def enough(progress):
        raise ValueError(progress.pages_done)

    began = daemon.tiers.verifies_ended
    with pytest.raises(ValueError, match="1"):
        kv.verify("host", on_progress=enough)
    comes(lambda: daemon.tiers.verifies_ended == began + 1)
    with pytest.raises(kvtier.ClientClosed):
        kv.verify("host", on_progress=lambda _: kv.close())


def test_the_deadline_of_verify_is_the_longest_silence(daemon, reports):
    with kvtier.connect(daemon.url, deadline=0.5) as kv:
        assert kv.verify("host", on_progress=lambda _: time.sleep(0.6)) == reports[-1]
        daemon.tiers.silent_after = 2
        seen = []
        for _ in range(2):
            with pytest.raises(kvtier.DeadlineExceeded, match="reported nothing"):
                within(1.0, lambda: kv.verify("host", on_progress=seen.append, deadline=1.0))
        assert seen == reports[:2] * 2
        assert kv.ping() > 0, "silence of a disk says nothing against the daemon"
        comes(lambda: daemon.tiers.verifies_ended == 3)
        daemon.stall.add("verify")
        with pytest.raises(kvtier.DeadlineExceeded):
            within(1.0, lambda: kv.verify("host", deadline=1.0))


def test_errors_of_verify(kv, daemon, tmp_path):
    for wrong in ("disk", Tier.SHARED, None):
        with pytest.raises(kvtier.LimitExceeded, match="tier"):
            kv.verify(wrong)
    for rate in (-1, 1.5, 1 << 63):
        with pytest.raises(kvtier.LimitExceeded, match="bytes_per_second"):
            kv.verify("host", bytes_per_second=rate)
    with pytest.raises(kvtier.errors.InvalidConfigValue):
        kv.verify("host", deadline=0)
    daemon.tiers.has_nvme = False
    with pytest.raises(kvtier.errors.InvalidInput):
        kv.verify("nvme")
    daemon.raise_in["verify"] = kvtier.Busy("a verify is under way", remedy="wait")
    with pytest.raises(kvtier.Busy, match="under way"):
        kv.verify("host")
    with (
        kvtier.connect(f"unix://{tmp_path}/none.sock") as other,
        pytest.raises(kvtier.DaemonUnavailable),
    ):
        within(1.0, lambda: other.verify("host"))
    with pytest.raises(kvtier.ClientClosed):
        other.verify("host")


def test_verify_with_a_daemon_that_goes_away(daemon, reports):
    with kvtier.connect(daemon.url) as kv:
        daemon.tiers.silent_after = 1
        with pytest.raises(kvtier.DaemonUnavailable):
            kv.verify("host", on_progress=lambda _: daemon.stop())


def test_closing_in_another_thread_ends_a_verify(daemon, reports):
    daemon.tiers.silent_after = 1
    with kvtier.connect(daemon.url) as kv:
        timer = threading.Timer(0.1, kv.close)
        timer.start()
        with pytest.raises(kvtier.ClientClosed):
            kv.verify("host")
        timer.join()


def test_an_interrupt_ends_a_verify(daemon, reports):
    daemon.tiers.silent_after = 1
    done = run_script(
        daemon,
        """
        import signal, threading, time
        seen = []
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        try:
            kv.verify("host", on_progress=seen.append)
        except KeyboardInterrupt:
            print("interrupted", len(seen), time.monotonic() - began < 5)
        """,
    )
    assert (done.returncode, done.stdout) == (0, "interrupted 1 True\n"), done.stderr
    comes(lambda: daemon.tiers.verifies_ended == 1)


# -- quarantine -----------------------------------------------------------------------------------


@pytest.fixture
def refs(daemon):
    made = [PageRef(2**63, Tier.HOST, 7, 100), PageRef(2**63, Tier.NVME, 2**40, 2**62)]
    daemon.tiers.quarantine = dict.fromkeys(made, RECORD)
    return made


def test_quarantine(kv, daemon, refs):
    told = [{}, {"device": "/mnt/a", "age_s": 1.5, "reason": "it is torn"}]
    assert kv.quarantine.list() == tuple(
        QuarantinedPage(
            ref=ref, fingerprint=bytes(32), shard=1, key=b"k" * 32, length=8192, codec=Codec.RAW,
            **more,
        )
        for ref, more in zip(refs, told, strict=True)
    )  # fmt: skip
    assert kv.quarantine.read(refs[1]) == RECORD
    assert kv.quarantine.clear([]) == 0, "no refs are not all refs"
    assert daemon.calls["clear_quarantine"] == 0
    assert kv.quarantine.clear(refs[:1]) == 1
    assert kv.quarantine.clear(refs[:1]) == 0
    with pytest.raises(kvtier.errors.UnknownHandle, match="no such copy"):
        kv.quarantine.read(refs[0])
    assert kv.quarantine.clear() == 1
    assert kv.quarantine.list() == ()


def test_many_refs_are_cut_to_the_limits_of_the_daemon(kv, daemon, refs):
    daemon.limits["keys_per_call_max"] = 2
    assert kv.quarantine.clear([*refs, *refs, refs[0]]) == 2
    assert daemon.calls["clear_quarantine"] == 3


def test_quarantine_leaves_out_what_this_version_does_not_know(kv, daemon, refs):
    daemon.tiers.quarantined_codec = 9
    assert kv.quarantine.list() == ()


def test_quarantine_with_the_daemon_absent_or_hung(daemon, refs, tmp_path):
    with kvtier.connect(f"unix://{tmp_path}/none.sock", deadline=0.5) as kv:
        for call in (kv.quarantine.list, lambda: kv.quarantine.read(refs[0]), kv.quarantine.clear):
            with pytest.raises(kvtier.DaemonUnavailable):
                within(0.5, call)
        assert kv.quarantine.clear([]) == 0
    daemon.stall |= {"list_quarantine", "read_quarantine", "clear_quarantine"}
    with kvtier.connect(daemon.url) as kv:
        calls = (
            lambda: kv.quarantine.list(deadline=0.2),
            lambda: kv.quarantine.read(refs[0], deadline=0.2),
            lambda: kv.quarantine.clear(deadline=0.2),
        )
        for call in calls:
            with pytest.raises(kvtier.DeadlineExceeded):
                within(0.2, call)
    with pytest.raises(kvtier.ClientClosed):
        kv.quarantine.list()


# -- status, asyncio ------------------------------------------------------------------------------


def test_devices(kv, daemon):
    assert kv.status().devices == ()
    daemon.tiers.devices = [
        admin_pb2.DeviceStatus(
            path="/a", online=True, direct_io=True, capacity_bytes=10, disk_bytes=5
        ),
        admin_pb2.DeviceStatus(path="/b", reason="Input/output error", capacity_bytes=10),
    ]
    assert kv.status().devices == (
        DeviceStatus(
            path="/a", is_online=True, reason="", is_direct_io=True, capacity_bytes=10, disk_bytes=5
        ),
        DeviceStatus(
            path="/b",
            is_online=False,
            reason="Input/output error",
            is_direct_io=False,
            capacity_bytes=10,
            disk_bytes=0,
        ),
    )


def test_the_asyncio_client(daemon, refs, reports):
    async def main():
        async with kvtier.aio.connect(daemon.url, deadline=5.0) as kv:
            seen = []
            assert await kv.verify("nvme", on_progress=seen.append) == reports[-1]
            assert seen == reports
            daemon.tiers.silent_after = 1
            with pytest.raises(kvtier.DeadlineExceeded):
                await kv.verify("host", deadline=0.1)
            watching = asyncio.create_task(kv.verify("host"))
            await asyncio.sleep(0.1)
            watching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await watching
            assert [page.ref for page in await kv.quarantine.list()] == refs
            assert await kv.quarantine.read(refs[0]) == RECORD
            assert await kv.quarantine.clear(refs) == 2
            await asyncio.to_thread(comes, lambda: daemon.tiers.verifies_ended == 3)

    asyncio.run(main())
