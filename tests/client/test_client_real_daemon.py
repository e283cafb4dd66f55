"""The client and a real daemon: what the fake cannot show, above all signals to a process."""

from __future__ import annotations

import random
import signal
import threading
import time

import numpy as np
import pytest

import kvtier
from tests.forks import ForkedDaemon

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode


def opaque(nbytes, **options):
    layers = next(n for n in range(1, 16) if nbytes % n == 0 and nbytes // n <= 1 << 20)
    segment = kvtier.Segment(
        name="o",
        role=kvtier.Role.OPAQUE,
        dtype="uint8",
        layers=layers,
        heads=1,
        dim=nbytes // layers,
        scale_rule=kvtier.ScaleRule.NONE,
    )
    return kvtier.Layout.from_segments(
        [segment], model_id="m", revision="r1", page_tokens=1, kv_compute="uint8", **options
    )


def random_pages(count, nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, nbytes), np.uint8)


def comes_back(call, seconds=5.0):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if call():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    "nbytes", [1, 64, 4095, 4097, (1 << 20) - 1, 1 << 20, (4 << 20) + 1, 9 << 20]
)
def test_pages_of_every_size(process, nbytes):
    """None needs the transport's limits raised: messages hold parts of a page, or many pages."""
    count = 4 if nbytes < 4 << 20 else 2
    with kvtier.connect(process.url, deadline=20) as kv:
        ns = kv.namespace(opaque(nbytes))
        pages = random_pages(count, nbytes)
        keys = ns.keys(range(count))
        put = ns.put(keys, pages)
        assert put.reasons == [PutCode.STORED] * count
        out = np.zeros_like(pages)
        got = ns.get(keys, out=out)
        assert got.reasons == [GetCode.HIT] * count
        assert np.array_equal(out, pages)
        assert got[0].ref == put[0].ref
        assert got[0].ref.boot_id == kv.status().boot_id
        assert ns.put(keys, pages).reasons == [PutCode.EXISTS] * count


def test_thousands_of_small_pages_in_one_call(process):
    with kvtier.connect(process.url, deadline=20) as kv:
        ns = kv.namespace(opaque(64))
        pages = random_pages(3000, 64)
        keys = ns.keys(range(3000))
        assert ns.put(keys, pages).stored == 3000
        out = np.zeros_like(pages)
        assert ns.get(keys, out=out).prefix == 3000
        assert np.array_equal(out, pages)
        assert ns.lookup(keys).prefix == 3000
        assert ns.delete(keys[:1000]).deleted == 1000
        assert ns.lookup(keys).hits == 2000


def test_status_and_capabilities(process):
    with kvtier.connect(process.url, deadline=5, client_name="me") as kv:
        kv.namespace(opaque(64), tenant="acme")
        status = kv.status()
        assert status.state == "ready"
        assert [tier.tier for tier in status.tiers] == [kvtier.Tier.HOST]
        assert [namespace.tenant for namespace in status.namespaces if namespace.tenant == "acme"]
        assert "me" in [session.client_name for session in status.sessions]
        assert "Pages.Get" in kv.capabilities().methods
        assert kv.ping() < 5


def test_bump_delete_and_leases(process):
    with kvtier.connect(process.url, deadline=5) as kv:
        layout = opaque(64)
        ns = kv.namespace(layout)
        other = kv.namespace(layout)
        keys = ns.keys(range(3))
        pages = random_pages(2, 64)
        ns.put(keys[:2], pages)
        with ns.lease(keys) as held:
            assert held.reasons == [GetCode.HIT, GetCode.HIT, GetCode.MISS]
            assert held.pages() == [pages[0].tobytes(), pages[1].tobytes(), None]
            held.renew()
        assert ns.bump() == 2
        assert ns.reopen() == 2
        assert ns.get(keys).reasons == [GetCode.MISS] * 3
        assert other.get(keys).reasons == [GetCode.STALE] * 3
        assert other.put(keys[:2], pages).reasons == [PutCode.STALE_GENERATION] * 2
        assert other.reopen() == 2
        assert other.put(keys[:2], pages).stored == 2
        assert kv.delete_namespace(layout) == 2
        assert ns.get(keys).reasons == [GetCode.STALE] * 3


def test_killed_daemon(process):
    with kvtier.connect(process.url, deadline=1.0) as kv:
        ns = kv.namespace(opaque(1 << 16))
        pages = random_pages(4, 1 << 16)
        keys = ns.keys(range(4))
        assert ns.put(keys, pages).stored == 4
        boot_id = kv.status().boot_id
        process.kill()
        began = time.monotonic()
        assert ns.get(keys).reasons == [GetCode.UNAVAILABLE] * 4
        assert ns.lookup(keys).reasons == [GetCode.UNAVAILABLE] * 4
        assert ns.put(keys, pages).reasons == [PutCode.UNAVAILABLE] * 4
        assert time.monotonic() - began < 3 * 1.2
        process.start()
        assert comes_back(lambda: ns.get(keys).reasons == [GetCode.MISS] * 4)
        put = ns.put(keys, pages)
        assert put.stored == 4
        assert put[0].ref.boot_id != boot_id
        out = np.zeros_like(pages)
        assert ns.get(keys, out=out).hits == 4
        assert np.array_equal(out, pages)


def test_stopped_daemon(process):
    """SIGSTOP: the socket is alive and nobody answers."""
    with kvtier.connect(process.url, deadline=0.3, plane="grpc") as kv:
        ns = kv.namespace(opaque(1 << 16))
        pages = random_pages(4, 1 << 16)
        keys = ns.keys(range(4))
        assert ns.put(keys, pages).stored == 4
        process.signal(signal.SIGSTOP)
        try:
            seen = set()
            for call in (
                lambda: ns.get(keys),
                lambda: ns.put(keys, pages),
                lambda: ns.lookup(keys),
            ):
                began = time.monotonic()
                seen.add(tuple(code.name for code in call().reasons))
                assert time.monotonic() - began < 0.3 * 1.2 + 0.05
            assert seen == {("TIMEOUT",) * 4}
            began = time.monotonic()
            assert ns.get(keys).reasons == [GetCode.UNAVAILABLE] * 4
            assert time.monotonic() - began < 0.05
            with pytest.raises(kvtier.DeadlineExceeded):
                kv.status()
        finally:
            process.signal(signal.SIGCONT)
        assert comes_back(lambda: ns.get(keys).hits == 4)


def test_kills_in_the_middle_of_calls_give_no_wrong_page(process):
    """Restarts under load: every page that counts as a hit is the right one."""
    seed = 7
    nbytes = 1 << 18
    pages = random_pages(8, nbytes, seed)
    wrong, counts = [], {"hits": 0, "others": 0}
    ended = threading.Event()
    with kvtier.connect(process.url, deadline=0.5) as kv:
        ns = kv.namespace(opaque(nbytes))
        keys = ns.keys(range(8))

        def step(number, rng, out):
            if rng.random() < 0.5:
                ns.put(keys, pages)
            out[:] = 0xA5
            for index, item in enumerate(ns.get(keys, out=out)):
                is_hit = item.reason is GetCode.HIT
                counts["hits" if is_hit else "others"] += 1
                if is_hit and not np.array_equal(out[index], pages[index]):
                    wrong.append((number, index))

        def work(number):
            rng = random.Random(seed + number)
            out = np.zeros_like(pages)
            while not ended.wait(0.01):
                try:
                    step(number, rng, out)
                except kvtier.KvtierError as error:
                    wrong.append((number, repr(error)))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                time.sleep(0.7)
                process.kill()
                process.start()
            assert comes_back(lambda: ns.put(keys, pages).stored == 8 and ns.get(keys).hits == 8)
        finally:
            ended.set()
            for thread in threads:
                thread.join(10)
        assert wrong == [], f"seed {seed}"
        assert counts["hits"] > 0
        assert counts["others"] > 0


def test_over_tcp(process, forker):
    process.stop()
    with ForkedDaemon(forker, process.base, "daemon.listen=grpc://127.0.0.1:17411") as running:
        del running
        with kvtier.connect("grpc://127.0.0.1:17411", deadline=5) as kv:
            ns = kv.namespace(opaque(1 << 20))
            pages = random_pages(3, 1 << 20)
            keys = ns.keys(range(3))
            assert ns.put(keys, pages).stored == 3
            out = np.zeros_like(pages)
            assert ns.get(keys, out=out).hits == 3
            assert np.array_equal(out, pages)


def test_closing_while_the_daemon_is_stopped(process):
    kv = kvtier.connect(process.url, deadline=0.3)
    ns = kv.namespace(opaque(1 << 16))
    pages = random_pages(64, 1 << 16)
    keys = ns.keys(range(64))
    process.signal(signal.SIGSTOP)
    try:
        assert ns.put(keys, pages).reasons == [PutCode.TIMEOUT] * 64
        began = time.monotonic()
        kv.close()
        assert time.monotonic() - began < 2
    finally:
        process.signal(signal.SIGCONT)
