"""The engine with a real daemon below: hits from each tier, damage, and a daemon that is away."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

import kvtier
from kvtier.client import Connection
from kvtier.client.device import PageNotHeld, PageTransfer, Transfer
from kvtier.testing.daemon_process import DaemonProcess
from kvtier.testing.held_stream import HeldStream
from kvtier_engine.cache.tiers import KvtierTiers
from kvtier_engine.demo.damage import flip_payload_byte
from kvtier_engine.engine import Engine
from kvtier_engine.errors import KvTagMismatch, RequestCancelled
from kvtier_engine.model.load import LoadedModel
from kvtier_engine.schedule.request import CachedTokens
from kvtier_engine.settings import EngineSettings, KvCacheDtype
from tests.engine.engine_rig import (
    PAGE_TOKENS,
    answers,
    engine_of,
    greedy,
    is_told_without_traceback,
    pool_of,
    prompt_of,
    tiny_model,
)
from tests.forks import ForkedDaemon, Forker

PROMPTS = [prompt_of(n, seed=n) for n in (3, 8, 9, 16, 17, 40, 100)]
REQUESTS = [greedy(prompt, 10) for prompt in PROMPTS]
#: Whole pages before the last token of each prompt.
CACHED = [0, 0, 8, 8, 16, 32, 96]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Loads what a connection would load in the background, beyond the end of a short test."""
    kvtier.warm_up()


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def cold(model: LoadedModel) -> list[tuple[int, ...]]:
    return [answers(engine_of(model), [request])[0].tokens for request in REQUESTS]


@pytest.fixture
def daemon(tmp_path: Path, forker: Forker) -> Iterator[DaemonProcess]:
    settings = (f"nvme.paths={tmp_path}/nvme", "nvme.bytes=64MiB")
    with ForkedDaemon(forker, tmp_path, *settings) as process:
        yield process


@contextmanager
def engine_on(
    model: LoadedModel,
    kv: Connection,
    *,
    deadline_seconds: float = 60.0,
    retry_seconds: float = 1.0,
    stream: HeldStream | None = None,
    kv_cache: KvCacheDtype = KvCacheDtype.AS_COMPUTED,
    **settings: object,
) -> Iterator[Engine]:
    """An engine with an empty pool; everything it offloads is stored when this ends. The deadline
    is long: what is counted depends on no machine's speed.
    """
    made = EngineSettings(**settings)
    pool = pool_of(model, chunk_pages=made.chunk_pages, kv_cache=kv_cache)
    tiers = KvtierTiers(
        kv, pool, deadline_seconds=deadline_seconds, retry_seconds=retry_seconds, stream=stream
    )
    engine = Engine(model, pool, tiers=tiers, settings=made)
    try:
        yield engine
        assert tiers.drain(20), "offloads hang"
    finally:
        tiers.close()
    engine.check_idle()
    assert pool.occupancy.pinned == 0


def told(engine: Engine) -> list[tuple[int, ...]]:
    return [done.tokens for done in answers(engine, REQUESTS)]


def test_a_new_engine_finds_in_host_memory_what_another_computed(
    model: LoadedModel, cold: list[tuple[int, ...]], daemon: DaemonProcess
) -> None:
    with kvtier.connect(daemon.url) as kv:
        with engine_on(model, kv) as engine:
            assert told(engine) == cold
        assert engine.stats()["offload_stored_pages"] == 23
        with engine_on(model, kv) as engine:
            done = answers(engine, REQUESTS)
        assert [one.tokens for one in done] == cold
        assert [one.cached for one in done] == [CachedTokens(host=count) for count in CACHED]
        assert engine.stats()["cached_host_tokens"] == sum(CACHED)
        for cached in ([0] * 7, [0, 0, 0, 0, 16, 32, 96]):
            # A family of its own: passes of another size give KV that differs in its last bits.
            with engine_on(model, kv, chunk_pages=2) as engine:
                done = answers(engine, REQUESTS)
            assert [one.cached.host for one in done] == cached
        with engine_on(model, kv) as engine:
            # All three tiers are in one picture.
            until = time.monotonic() + 20
            while not kv.status().pools:
                assert time.monotonic() < until, "the pool never appears"
                time.sleep(0.01)


def test_after_a_crash_it_is_found_on_nvme(
    model: LoadedModel, cold: list[tuple[int, ...]], daemon: DaemonProcess
) -> None:
    with kvtier.connect(daemon.url) as kv:
        with engine_on(model, kv) as engine:
            told(engine)
        kv.flush(deadline=20)
    daemon.kill()
    daemon.start()
    with kvtier.connect(daemon.url) as kv, engine_on(model, kv) as engine:
        done = answers(engine, REQUESTS)
    assert [one.tokens for one in done] == cold
    assert [one.cached for one in done] == [CachedTokens(nvme=count) for count in CACHED]


def test_a_damaged_page_alone_is_computed_again(
    model: LoadedModel, cold: list[tuple[int, ...]], tmp_path: Path, forker: Forker
) -> None:
    # Without an NVMe tier, which would have a good copy.
    with ForkedDaemon(forker, tmp_path) as daemon, kvtier.connect(daemon.url) as kv:
        with engine_on(model, kv) as engine:
            told(engine)
            namespace = kv.namespace(engine.pool.layout)
        keys = namespace.keys(PROMPTS[-1])
        ref = namespace.get(keys)[5].ref
        assert ref is not None
        flip_payload_byte(daemon.pid, ref.slot, at=100)
        with engine_on(model, kv) as engine:
            (done,) = answers(engine, REQUESTS[-1:])
        assert done.tokens == cold[-1]
        assert done.cached == CachedTokens(host=96 - PAGE_TOKENS)
        stats = engine.stats()
        assert (stats["load_hit_pages"], stats["load_corrupt_pages"]) == (11, 1)
        # The page and the four tokens after the last whole page; and it is stored again.
        assert (stats["prefill_passes"], stats["offload_stored_pages"]) == (2, 1)
        assert namespace.lookup(keys).hits == len(keys)


AWAY: dict[str, Callable[[DaemonProcess], object]] = {
    "killed": DaemonProcess.kill,
    "stopped": lambda daemon: daemon.signal(signal.SIGSTOP),
}


@pytest.mark.parametrize("how", AWAY)
def test_a_daemon_that_goes_away_and_comes_back(
    model: LoadedModel, cold: list[tuple[int, ...]], daemon: DaemonProcess, how: str
) -> None:
    with kvtier.connect(daemon.url) as kv:
        with engine_on(model, kv) as engine:
            told(engine)
        with engine_on(model, kv, deadline_seconds=0.5) as engine:
            AWAY[how](daemon)
            done = answers(engine, REQUESTS)
            assert [one.tokens for one in done] == cold
            if how == "killed":
                assert sum(one.cached.total for one in done) == 0
                assert engine.stats()["away"] >= 1
                daemon.start()
            else:
                daemon.signal(signal.SIGCONT)
            until = time.monotonic() + 30
            found = 0
            while not found:  # connects anew by itself
                assert time.monotonic() < until, "never found again"
                with engine_on(model, kv, deadline_seconds=5.0) as fresh:
                    done = answers(fresh, REQUESTS)
                assert [one.tokens for one in done] == cold
                found = sum(one.cached.total for one in done)


def test_a_daemon_that_was_never_there(
    model: LoadedModel, cold: list[tuple[int, ...]], tmp_path: Path
) -> None:
    with (
        kvtier.connect(f"unix://{tmp_path}/none.sock") as kv,
        engine_on(model, kv, deadline_seconds=0.5) as engine,
    ):
        assert told(engine) == cold
        assert engine.stats()["load_unavailable_pages"] > 0


def test_a_connection_that_is_closed_under_the_engine(
    model: LoadedModel,
    cold: list[tuple[int, ...]],
    daemon: DaemonProcess,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv = kvtier.connect(daemon.url)
    with engine_on(model, kv) as engine:
        first = engine.submit(REQUESTS[-1])
        engine.step()
        kv.close()
        assert told(engine) == cold
        assert first.result(0).tokens == cold[-1]
        assert engine.stats()["transfers_broken"] > 0
    is_told_without_traceback(caplog, "engine.tiers_away", "ClientClosed")


def test_a_request_is_given_up_while_its_pages_are_loaded(
    model: LoadedModel, cold: list[tuple[int, ...]], daemon: DaemonProcess
) -> None:
    with kvtier.connect(daemon.url) as kv:
        with engine_on(model, kv) as engine:
            told(engine)
        stream = HeldStream()
        with engine_on(model, kv, stream=stream) as engine:
            handle = engine.submit(REQUESTS[-1])
            engine.step()
            stream.wait_for_copies(1)  # its pages have been read, and are about to be written
            loading = engine.inside.sequence(handle).table.ids[:12]
            engine.cancel(handle)
            engine.step()
            with pytest.raises(RequestCancelled):
                handle.result(0)
            # Others go on meanwhile, and get none of the pages that the load may still write.
            assert engine.pool.occupancy.draining == len(loading)
            others = engine.submit(greedy(PROMPTS[0], 10))
            engine.run_until_idle()
            assert others.result(0).tokens == cold[0]
            assert engine.pool.occupancy.draining == len(loading)
            stream.let_go()
            assert told(engine) == cold


def test_waiting_ends_with_a_copy(model: LoadedModel, daemon: DaemonProcess) -> None:
    """Pages of one who is gone drain while a copy uses them: nobody spins for them."""
    stream = HeldStream()
    with kvtier.connect(daemon.url) as kv, engine_on(model, kv, stream=stream) as engine:
        gone = engine.submit(REQUESTS[-1])
        engine.step()
        stream.wait_for_copies(1)  # its load
        engine.cancel(gone)
        engine.step()
        assert engine.pool.occupancy.draining > 0
        waiting = engine.submit(REQUESTS[0])
        engine.step()  # takes it
        started = time.monotonic()
        engine.wait_for_loads(0.1)
        assert time.monotonic() - started >= 0.1, "it does not wait"
        timer = threading.Timer(0.05, stream.let_go)
        timer.start()
        engine.wait_for_loads(1000.0)
        timer.join()
        assert time.monotonic() - started < 500
        engine.run_until_idle()
        assert waiting.result(0).tokens


@pytest.mark.parametrize("session", ["\ud800", "x" * 1000], ids=["surrogate", "long"])
def test_a_session_that_is_none_keeps_nobody_else_from_the_tiers(
    model: LoadedModel,
    cold: list[tuple[int, ...]],
    daemon: DaemonProcess,
    session: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with kvtier.connect(daemon.url) as kv:
        with engine_on(model, kv) as engine:
            told(engine)
        with engine_on(model, kv) as engine:
            odd = dataclasses.replace(REQUESTS[4], session=session)
            (done,) = answers(engine, [odd])
            assert (done.tokens, done.cached.total) == (cold[4], 0)
            (done,) = answers(engine, REQUESTS[-1:])
            assert (done.tokens, done.cached.host) == (cold[-1], 96)
            assert engine.stats()["transfers_failed"] == 2  # its load and its offload
            assert "away" not in engine.stats()
    is_told_without_traceback(caplog, "engine.transfer_refused", "LimitExceeded")


class BrokenStream(HeldStream):
    """A device whose copies raise."""

    def submit(self, copy: Callable[[], None]) -> NoReturn:
        raise RuntimeError("CUDA error: an illegal memory access")


def test_a_device_whose_copies_fail_costs_loads_and_nothing_else(
    model: LoadedModel, cold: list[tuple[int, ...]], daemon: DaemonProcess
) -> None:
    with kvtier.connect(daemon.url) as kv:
        with engine_on(model, kv) as engine:
            told(engine)
        with engine_on(model, kv, stream=BrokenStream()) as engine, engine:
            handles = [engine.submit(request) for request in REQUESTS]
            assert [handle.result(60).tokens for handle in handles] == cold
            engine.close()
            assert engine.stats()["load_unavailable_pages"] == sum(CACHED) // PAGE_TOKENS


STARTS = {
    "load": (PageTransfer, "start_layered_load"),
    "offload": (PageTransfer, "start_offload"),
    "poll": (Transfer, "poll"),
}


@pytest.mark.parametrize(
    ("where", "kind"),
    [("load", RuntimeError), ("offload", ValueError), ("poll", kvtier.ClientClosed)],
)
def test_a_transfer_that_raises_costs_a_load_and_nothing_else(
    model: LoadedModel,
    cold: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    kind: type[Exception],
) -> None:
    def fails(*_: object, **__: object) -> NoReturn:
        raise kind("planted", remedy="none") if kind is kvtier.ClientClosed else kind("planted")

    with (
        kvtier.connect(f"unix://{tmp_path}/none.sock") as kv,
        engine_on(model, kv, deadline_seconds=0.5, retry_seconds=0.0) as engine,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*STARTS[where], fails)
            assert told(engine) == cold
        stats = engine.stats()
        name = "transfers_broken" if kind is kvtier.ClientClosed else "transfers_failed"
        assert stats[name] > 0
        assert stats.get("requests_failed", 0) == 0
    if kind is kvtier.ClientClosed:
        is_told_without_traceback(caplog, "engine.tiers_away", "ClientClosed")
    else:
        crashes = [record.exc_info[0] for record in caplog.records if record.exc_info]
        assert set(crashes) == {kind}


def test_a_load_into_pages_that_are_not_held_ends_its_request(
    model: LoadedModel, cold: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> NoReturn:
        raise PageNotHeld("planted", remedy="none")

    with (
        kvtier.connect(f"unix://{tmp_path}/none.sock") as kv,
        engine_on(model, kv, deadline_seconds=0.5) as engine,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(PageTransfer, "start_layered_load", fails)
            bad, short = engine.submit(REQUESTS[-1]), engine.submit(REQUESTS[0])
            engine.run_until_idle()
        with pytest.raises(KvTagMismatch):
            bad.result(0)
        assert short.result(0).tokens == cold[0]
        engine.check_idle()


def test_evicted_prefixes_come_back_from_the_host(
    model: LoadedModel, cold: list[tuple[int, ...]], daemon: DaemonProcess
) -> None:
    """A pool with room for one long prompt: every turn finds its prefix one tier lower."""
    with kvtier.connect(daemon.url) as kv:
        pool = pool_of(model, 15)
        tiers = KvtierTiers(kv, pool, deadline_seconds=60.0)
        engine = Engine(model, pool, tiers=tiers)
        try:
            others = greedy(prompt_of(100, seed=50), 10)
            for turn in range(3):
                (done,) = answers(engine, REQUESTS[-1:])
                assert done.tokens == cold[-1]
                assert done.cached.total == (96 if turn else 0)
                assert done.cached.host >= (80 if turn else 0)
                assert tiers.drain(20)
                answers(engine, [others])
                assert tiers.drain(20)
        finally:
            tiers.close()
        engine.check_idle()
