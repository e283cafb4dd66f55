"""The engine over an fp8 pool: half the bytes, hits of every tier, a family of its own, and how far
its answers are from those over plain pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

import kvtier
from kvtier.client import Connection
from kvtier.errors import LayoutError
from kvtier_engine.cache.tiers import KvtierTiers
from kvtier_engine.engine import Engine
from kvtier_engine.errors import InvalidRequest, RequestFailed
from kvtier_engine.model.load import LoadedModel
from kvtier_engine.schedule.request import CachedTokens, Completion
from kvtier_engine.settings import KvCacheDtype
from tests.engine.engine_rig import (
    PAGE_TOKENS,
    answers,
    engine_of,
    greedy,
    pool_of,
    prompt_of,
    tiny_model,
)
from tests.forks import ForkedDaemon, Forker

FP8, PLAIN = KvCacheDtype.FP8_E4M3, KvCacheDtype.AS_COMPUTED
PROMPTS = [prompt_of(n, seed=n) for n in (3, 8, 9, 16, 17, 40, 100)]
REQUESTS = [greedy(prompt, 10, logprobs=2) for prompt in PROMPTS]
CACHED = [0, 0, 8, 8, 16, 32, 96]
#: Of the natural logarithms of the likeliest tokens, between fp8 and plain pages. The network here
#: is random: its logits are far more sensitive than those of one that was trained.
LOGPROB_BOUND = 0.5
DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, id="bf16"),
]
DTYPES_AND_CACHES = [
    pytest.param(torch.float32, PLAIN, id="fp32-plain"),
    pytest.param(torch.bfloat16, FP8, id="bf16-fp8"),
    pytest.param(torch.bfloat16, PLAIN, id="bf16-plain", marks=pytest.mark.soak),
    pytest.param(torch.float32, FP8, id="fp32-fp8", marks=pytest.mark.soak),
]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    kvtier.warm_up()


@pytest.fixture(scope="module")
def models() -> dict[torch.dtype, LoadedModel]:
    return {dtype: tiny_model(dtype) for dtype in (torch.float32, torch.bfloat16)}


@contextmanager
def engine_on(model: LoadedModel, kv: Connection, kv_cache: KvCacheDtype = FP8) -> Iterator[Engine]:
    pool = pool_of(model, kv_cache=kv_cache)
    tiers = KvtierTiers(kv, pool, deadline_seconds=60)
    engine = Engine(model, pool, tiers=tiers)
    try:
        yield engine
        assert tiers.drain(20), "offloads hang"
    finally:
        tiers.close()
    engine.check_idle()


def one_by_one(engine: Engine) -> list[Completion]:
    """Each alone, so that a batch has the same rows in every run."""
    return [answers(engine, [request])[0] for request in REQUESTS]


def prompt_bytes(engine: Engine) -> list[torch.Tensor]:
    """What the pool holds of the pages of each prompt that may be shared."""
    return [engine.pool.rows[list(engine.inside.cached_pages(prompt))] for prompt in PROMPTS]


def same_bytes(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def tokens_of(done: list[Completion]) -> list[tuple[int, ...]]:
    return [one.tokens for one in done]


def test_a_pool_of_the_same_bytes_has_room_for_nearly_twice_the_tokens(
    models: dict[torch.dtype, LoadedModel],
) -> None:
    """Of bytes that are really there, beside bfloat16."""
    model = models[torch.bfloat16]
    plain, packed = pool_of(model, 40), pool_of(model, 40, kv_cache=FP8)
    tokens = {
        pool: plain.rows.nbytes // (pool.rows.nbytes // pool.pages) * pool.form.page_tokens
        for pool in (plain, packed)
    }
    assert tokens[plain] == 40 * PAGE_TOKENS
    assert tokens[packed] >= 1.9 * tokens[plain]
    # A request as long as this is refused by the one, and served by the other pool of its bytes.
    long = greedy(prompt_of(400, seed=3), 2)
    room = plain.rows.nbytes * 2 // 3
    pages = {pool: room // (pool.rows.nbytes // pool.pages) for pool in (plain, packed)}
    with pytest.raises(InvalidRequest):
        engine_of(model, pages=pages[plain]).submit(long)
    (done,) = answers(engine_of(model, pages=pages[packed], kv_cache=FP8), [long])
    assert len(done.tokens) == 2


@pytest.mark.parametrize(("dtype", "cache"), DTYPES_AND_CACHES)
def test_a_hit_from_every_tier_gives_the_cold_text_and_bytes(
    models: dict[torch.dtype, LoadedModel],
    tmp_path: Path,
    forker: Forker,
    dtype: torch.dtype,
    cache: KvCacheDtype,
) -> None:
    """The bytes of the pool's pages after a load are those of the run that found nothing."""
    model = models[dtype]
    engine = engine_of(model, kv_cache=cache)
    cold = one_by_one(engine)
    again = one_by_one(engine)
    assert tokens_of(again) == tokens_of(cold)
    assert [one.cached for one in again] == [CachedTokens(device=count) for count in CACHED]
    rows = prompt_bytes(engine)
    assert sum(map(len, rows)) == sum(len(prompt) // PAGE_TOKENS for prompt in PROMPTS)
    settings = (f"nvme.paths={tmp_path}/nvme", "nvme.bytes=64MiB")
    with ForkedDaemon(forker, tmp_path, *settings) as daemon:
        with kvtier.connect(daemon.url) as kv:
            with engine_on(model, kv, cache) as first:
                assert tokens_of(one_by_one(first)) == tokens_of(cold)
            with engine_on(model, kv, cache) as second:
                host = one_by_one(second)
                assert same_bytes(prompt_bytes(second), rows)
            kv.flush(deadline=20)
        daemon.kill()
        daemon.start()
        with kvtier.connect(daemon.url) as kv, engine_on(model, kv, cache) as third:
            nvme = one_by_one(third)
            assert same_bytes(prompt_bytes(third), rows)
    assert tokens_of(host) == tokens_of(nvme) == tokens_of(cold)
    assert [one.logprobs for one in host] == [one.logprobs for one in cold], "not to the bit"
    assert [one.cached for one in host] == [CachedTokens(host=count) for count in CACHED]
    assert [one.cached for one in nvme] == [CachedTokens(nvme=count) for count in CACHED]


def test_engines_that_keep_kv_another_way_never_share(
    models: dict[torch.dtype, LoadedModel], daemon_url: str
) -> None:
    """bf16 and fp8 pages, and fp8 pages that a network in float32 and one in bfloat16 made."""
    ways = [
        (torch.bfloat16, PLAIN),
        (torch.bfloat16, FP8),
        (torch.float32, FP8),
        (torch.float32, PLAIN),
    ]
    with kvtier.connect(daemon_url) as kv:
        fingerprints = set()
        for turn in range(2):
            for dtype, cache in ways:
                with engine_on(models[dtype], kv, cache) as engine:
                    done = one_by_one(engine)
                    fingerprints.add(kv.namespace(engine.pool.layout).fingerprint)
                found = [one.cached.total for one in done]
                assert found == (CACHED if turn else [0] * len(CACHED)), (dtype, cache)
        assert len(fingerprints) == len(ways)


@pytest.fixture
def daemon_url(tmp_path: Path, forker: Forker) -> Iterator[str]:
    with ForkedDaemon(forker, tmp_path) as process:
        yield process.url


@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_are_those_of_plain_pages_within_a_bound(
    models: dict[torch.dtype, LoadedModel], dtype: torch.dtype
) -> None:
    """Logprobs of the first token within the bound; texts are equal until the plain run's two
    likeliest tokens are closer than it.
    """
    model = models[dtype]
    plain = one_by_one(engine_of(model, kv_cache=PLAIN))
    packed = one_by_one(engine_of(model, kv_cache=FP8))
    assert any(a.logprobs != b.logprobs for a, b in zip(plain, packed, strict=True))
    for ours, theirs in zip(packed, plain, strict=True):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            here, there = dict(a.top), dict(b.top)
            for token in here.keys() & there.keys():
                assert abs(here[token] - there[token]) < LOGPROB_BOUND
            if a.token != b.token:
                (_, first), (_, second) = b.top
                assert first - second < LOGPROB_BOUND
                break


@pytest.mark.parametrize("cache", [FP8, PLAIN], ids=["fp8", "plain"])
def test_a_batch_under_pressure_gives_what_each_gets_alone(
    models: dict[torch.dtype, LoadedModel], cache: KvCacheDtype
) -> None:
    """Preemption, eviction and shared prefixes change neither a prompt's first token, with its
    logprobs, nor a byte of its pages. Later tokens depend on who else was in their batch.
    """
    alone = engine_of(models[torch.float32], kv_cache=cache)
    expected = one_by_one(alone)
    pages = dict(zip(PROMPTS, prompt_bytes(alone), strict=True))
    engine = engine_of(models[torch.float32], pages=15, kv_cache=cache)
    are_same: list[bool] = []

    def compare(prompt: tuple[int, ...], event: object) -> None:
        """At every token: what the pool holds of this prompt just then."""
        found = engine.inside.cached_pages(prompt)
        pairs = zip(engine.pool.rows[list(found)], pages[prompt], strict=False)
        are_same.extend(torch.equal(here, there) for here, there in pairs)

    handles = [
        engine.submit(request, sink=partial(compare, request.prompt))
        for request in [*REQUESTS, *REQUESTS]
    ]
    engine.run_until_idle()
    engine.check_idle()
    done = [handle.result(0) for handle in handles]
    assert [len(one.tokens) for one in done] == [10] * (2 * len(REQUESTS))
    assert [one.logprobs[0] for one in done] == [one.logprobs[0] for one in expected * 2]
    assert all(are_same), f"{are_same.count(False)} of {len(are_same)} pages"
    assert len(are_same) > sum(map(len, pages.values())), "pages were hardly looked at"
    assert engine.stats()["evicted_pages"] + engine.stats().get("preemptions", 0) > 0


def test_a_page_that_holds_no_numbers_ends_its_request_and_is_not_shared(
    models: dict[torch.dtype, LoadedModel],
) -> None:
    engine = engine_of(models[torch.float32], kv_cache=FP8)
    (cold,) = answers(engine, REQUESTS[-1:])
    held = [page for page in range(engine.pool.pages) if engine.pool.references(page)]
    engine.pool.kv[held[3]].view(torch.uint8)[0, 0, 2, 1, 3] = 0x7F
    handle = engine.submit(REQUESTS[-1])
    engine.run_until_idle()
    with pytest.raises(RequestFailed, match="no numbers"):
        handle.result(0)
    (again,) = answers(engine, REQUESTS[-1:])
    assert again.tokens == cold.tokens
    assert again.cached.device < 96


def test_a_pool_of_another_way_is_refused(models: dict[torch.dtype, LoadedModel]) -> None:
    half, whole = models[torch.bfloat16], models[torch.float32]
    with pytest.raises(LayoutError, match="kv_compute"):
        Engine(whole, pool_of(half, kv_cache=FP8))
    with pytest.raises(LayoutError, match="kv_compute"):
        Engine(half, pool_of(half, chunk_pages=2))
