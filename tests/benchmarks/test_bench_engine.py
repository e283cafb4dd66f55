"""What the engine's benchmarks count is what was decoded, by all their requests, in their pools."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks import engine_decode, engine_kv, engine_profile
from benchmarks.plan import Plan
from benchmarks.rows import Row
from kvtier.client.device import DevicePool
from kvtier_engine.model.load import LoadedModel
from kvtier_engine.settings import layout_of
from tests.engine.engine_rig import tiny_model

BATCHES = [(1, 33, 32), (8, 33, 32), (32, 17, 32), (16, 17, 96)]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model(torch.bfloat16)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second from one look at the clock to the next: a rate is a count of tokens."""
    seconds = itertools.count()
    monkeypatch.setattr(engine_decode, "perf_counter", lambda: float(next(seconds)))


def pool_for(model: LoadedModel, pages: int) -> DevicePool:
    return DevicePool(layout_of(model, page_tokens=engine_decode.PAGE_TOKENS), pages)


@pytest.mark.parametrize(("batch", "tokens", "prompt_tokens"), BATCHES)
def test_the_rate_counts_what_is_decoded_while_the_clock_runs(
    model: LoadedModel, ticks: None, batch: int, tokens: int, prompt_tokens: int
) -> None:
    work = engine_decode.work_of(260, batch, tokens, 1, prompt_tokens)
    assert engine_decode.engine_rate(model, work) == batch * (tokens - 1) == work.timed_tokens


class Generates:
    """Looks at the clock as often as generate would, and gives so many tokens."""

    def __init__(self, tokens: int, looks: int) -> None:
        self._tokens, self._looks = tokens, looks

    def generate(self, ids: torch.Tensor, *, stopping_criteria: list, **_: object) -> torch.Tensor:
        for _look in range(self._looks):
            stopping_criteria[0](ids, None)
        return torch.zeros((len(ids), ids.shape[1] + self._tokens), dtype=torch.long)


def test_the_other_side_is_counted_in_the_same_way(ticks: None) -> None:
    work = engine_decode.work_of(260, 8, 33, 1)
    # A second for each of the 32 steps after the first token.
    assert engine_decode.transformers_rate(Generates(33, 33), work) == 8 == work.timed_tokens / 32
    for tokens, looks in ((32, 33), (33, 32), (1, 1)):
        with pytest.raises(RuntimeError, match="timed steps"):
            engine_decode.transformers_rate(Generates(tokens, looks), work)


def test_every_request_is_there_for_every_step(model: LoadedModel) -> None:
    """By the length of each request, not by a counter."""
    work = engine_decode.work_of(260, 8, 5, 1, 96)
    engine = engine_decode.all_decoding(model, pool_for(model, work.pages), work)
    before = [len(one.tokens) for one in engine.inside.sequences]
    assert len(before) == 8
    assert max(before) > min(before), "prefill and decode do not take turns any more"
    for _ in range(work.steps):
        engine.step()
    after = [len(one.tokens) for one in engine.inside.sequences]
    assert [now - then for now, then in zip(after, before, strict=True)] == [work.steps] * 8
    assert max(after) <= work.request_tokens
    engine.close()


@pytest.mark.parametrize("batch", engine_decode.BATCHES)
def test_all_contexts_are_as_long_as_those_of_the_other_side(
    model: LoadedModel, batch: int
) -> None:
    asked = engine_decode.work_of(260, batch, 5, 1)
    work = asked.evened()
    engine = engine_decode.all_decoding(model, pool_for(model, work.pages), work)
    # Prompt and first token, after which generate is timed.
    lengths = [len(one.tokens) for one in engine.inside.sequences]
    assert lengths == [len(prompt) + 1 for prompt in asked.prompts]
    engine.close()


def test_prompts_that_cannot_be_evened_are_refused() -> None:
    for batch, prompt_tokens in ((33, 32), (8, 33)):
        with pytest.raises(ValueError, match="tokens"):
            engine_decode.work_of(260, batch, 5, 1, prompt_tokens).evened()


def test_a_request_that_ends_or_has_no_pages_is_no_throughput(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = engine_decode.work_of(260, 8, 17, 1, 96)
    with pytest.raises(RuntimeError, match="decode"):
        engine_decode.engine_rate(model, work, pool_for(model, work.pages * 2 // 3))
    monkeypatch.setattr(engine_decode.Work, "engine_tokens", 17)
    with pytest.raises(RuntimeError, match="of 8 requests decode"):
        engine_decode.engine_rate(model, work)


def test_throughput_of_fp8_pages_is_that_of_what_fits_into_the_same_bytes(
    model: LoadedModel, ticks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = pool_for(model, 1).form.nbytes
    monkeypatch.setattr(engine_kv, "POOL_BYTES", 35 * page)
    best, single = engine_kv.speed(model, Plan(rounds_given=1))
    assert isinstance(best, Row)
    assert isinstance(single, Row)
    # Five pages a request; an fp8 page is half a page and its scales.
    assert (best.value, best.reference_value) == (13 * 16, 7 * 16)
    assert (best.what, best.reference) == ("decode of 13 requests, fp8", "bfloat16, 7 at once")
    assert (single.value, single.reference_value) == (16, 16)
    monkeypatch.setattr(engine_kv, "REQUEST_TOKENS", 150)
    with pytest.raises(RuntimeError, match="comes to"):
        list(engine_kv.speed(model, Plan(rounds_given=1)))


def test_a_clock_runs_for_one_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second from each look to the next: whoever is called takes it from its caller."""
    seconds = itertools.count()
    monkeypatch.setattr(engine_profile, "perf_counter", lambda: float(next(seconds)))
    clock = engine_profile.Clock()

    def fails() -> None:
        raise ValueError("it fails")

    inner = clock.wrapped(lambda: None, "attention")

    def work() -> None:
        inner()
        inner()
        with pytest.raises(ValueError, match="it fails"):
            clock.wrapped(fails, "choice")()

    clock.wrapped(work, "network")()
    assert clock.turn_to("rest") == "rest"
    assert clock.seconds == {"rest": 2.0, "network": 4.0, "attention": 2.0, "choice": 1.0}


def test_a_profile_has_all_of_a_step(model: LoadedModel) -> None:
    work = engine_decode.work_of(260, 3, 9, 1)
    before = {name: getattr(place, name) for place, name, _ in engine_profile._WRAPPED}
    parts, step = engine_profile.shares(model, work)
    assert sum(parts.values()) == pytest.approx(100)
    assert all(part > 0 for part in parts.values()), parts
    assert step > 0
    assert before == {name: getattr(place, name) for place, name, _ in engine_profile._WRAPPED}
