"""What goes wrong once: numbers, pages, texts, choices, sinks. It ends one request, or none."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from kvtier.client.device import PageNotHeld
from kvtier_engine.cache.radix import RadixCache
from kvtier_engine.engine import Engine
from kvtier_engine.errors import EngineClosed, EngineStarted, KvTagMismatch, RequestFailed
from kvtier_engine.handle import Handle, Outcome
from kvtier_engine.model.llama import Llama
from kvtier_engine.model.load import LoadedModel
from kvtier_engine.model.tokens import TextStream
from kvtier_engine.schedule.request import Completion, Delta
from kvtier_engine.schedule.runner import ModelRunner
from kvtier_engine.schedule.scheduler import Scheduler
from kvtier_engine.settings import Integrity
from tests.engine.engine_rig import answers, engine_of, greedy, prompt_of, tiny_model

PROMPT, OTHER = greedy(prompt_of(40, seed=1), 6), greedy(prompt_of(21, seed=2), 6)
PAGES = 5


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> tuple[int, ...]:
    return answers(engine_of(model), [PROMPT])[0].tokens


def bad_logits(engine: Engine, logits: torch.Tensor | None) -> None:
    if logits is not None:
        with torch.inference_mode():
            logits[0, 3] = torch.nan


def bad_kv(engine: Engine, logits: torch.Tensor | None) -> None:
    """The last page alone, which no later pass of the prompt reads."""
    if logits is not None:
        (sequence,) = engine.inside.sequences
        engine.pool.kv[sequence.table.ids[-1], 1, 0, 2] = torch.inf


@pytest.mark.parametrize("spoil", [bad_logits, bad_kv])
def test_what_was_computed_with_no_numbers_is_found_by_nobody(
    model: LoadedModel,
    expected: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Engine, torch.Tensor | None], None],
) -> None:
    engine = engine_of(model)
    prefill = ModelRunner.prefill

    def spoilt(self: ModelRunner, plan: object) -> torch.Tensor | None:
        logits = prefill(self, plan)
        spoil(engine, logits)
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "prefill", spoilt)
        bad = engine.submit(PROMPT)
        engine.run_until_idle()
    with pytest.raises(RequestFailed, match="no numbers"):
        bad.result(0)
    assert engine.stats()["pages_cached"] == 0
    engine.check_idle()
    (again,) = answers(engine, [PROMPT])
    assert (again.tokens, again.cached.device) == (expected, 0)


def test_a_cached_page_that_goes_bad_fails_one_request_and_no_more(
    model: LoadedModel, expected: tuple[int, ...]
) -> None:
    engine = engine_of(model)
    answers(engine, [PROMPT])
    ids = engine.inside.cached_pages(PROMPT.prompt)
    engine.pool.kv[ids[1], 0, 1, 3] = torch.nan
    bad = engine.submit(PROMPT)
    engine.run_until_idle()
    with pytest.raises(RequestFailed, match="no numbers"):
        bad.result(0)
    (again,) = answers(engine, [PROMPT])
    assert (again.tokens, again.cached.device) == (expected, 8)


def test_numbers_that_end_while_it_decodes_take_its_pages_from_the_tree(
    model: LoadedModel, expected: tuple[int, ...]
) -> None:
    engine = engine_of(model)
    bad = engine.submit(PROMPT)
    while engine.stats().get("decode_passes", 0) < 2:
        engine.step()
    engine.pool.kv[engine.inside.cached_pages(PROMPT.prompt)[2]] = torch.nan
    engine.run_until_idle()
    with pytest.raises(RequestFailed, match="no numbers"):
        bad.result(0)
    engine.check_idle()
    assert answers(engine, [PROMPT])[0].tokens == expected


def test_a_prefix_found_by_a_request_that_is_not_admitted_is_given_back(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is taken of the prefix tree is the request's before anything else can go wrong."""
    engine = engine_of(model, pages=8)
    answers(engine, [PROMPT])
    answers(engine, [OTHER])
    assert engine.inside.cached_pages(PROMPT.prompt)
    longer = greedy((*PROMPT.prompt, *range(10, 22)), 6)

    def broken(page: int) -> int:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(engine.pool, "references", broken)
        bad = engine.submit(longer)
        engine.run_until_idle()
    with pytest.raises(RequestFailed, match="could not be planned"):
        bad.result(0)
    engine.check_idle()
    assert answers(engine, [longer])[0].tokens == answers(engine_of(model), [longer])[0].tokens


def freed_and_given_away(engine: Engine, page: int) -> Callable[[], None]:
    """One reference too many is freed, and another request gets the page."""
    engine.pool.free([page])
    assert engine.pool.allocate(1) == [page]
    engine.pool.rows[page].zero_()
    return lambda: engine.pool.free([page])


def freed_under_a_copy(engine: Engine, page: int) -> Callable[[], None]:
    engine.pool.pin([page])
    engine.pool.free([page])
    engine.pool.rows[page].zero_()
    return lambda: engine.pool.unpin([page])


@pytest.mark.parametrize("integrity", Integrity, ids=lambda value: value.name)
@pytest.mark.parametrize("fault", [freed_and_given_away, freed_under_a_copy])
@pytest.mark.parametrize("place", [0, 3])
def test_a_prefix_whose_page_was_given_away_is_computed_again(
    model: LoadedModel,
    expected: tuple[int, ...],
    place: int,
    fault: Callable[[Engine, int], Callable[[], None]],
    integrity: Integrity,
) -> None:
    engine = engine_of(model, integrity=integrity)
    answers(engine, [PROMPT])
    undo = fault(engine, engine.inside.cached_pages(PROMPT.prompt)[place])
    handle = engine.submit(PROMPT)
    engine.run_until_idle()
    assert handle.result(0).tokens == expected
    assert handle.result(0).cached.device == 8 * place
    assert engine.stats()["stale_prefix_pages"] == 1
    undo()
    engine.check_idle()
    (again,) = answers(engine, [PROMPT])  # and is found in its new pages
    assert (again.tokens, again.cached.device) == (expected, 32)


def test_eviction_leaves_a_page_to_the_one_who_has_it(model: LoadedModel) -> None:
    engine = engine_of(model, pages=9)
    answers(engine, [PROMPT])
    page = engine.inside.cached_pages(PROMPT.prompt)[4]
    undo = freed_and_given_away(engine, page)
    handle = engine.submit(greedy(prompt_of(60, seed=5), 4))  # all the pages but that one
    engine.run_until_idle()
    assert len(handle.result(0).tokens) == 4
    assert engine.pool.references(page) == 1
    undo()
    engine.check_idle()


def test_a_prompt_whose_page_was_given_away_is_not_shared(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tags, too: nothing of it is put under the prompt's name."""
    engine = engine_of(model)
    share = Scheduler.share_prefix

    def given_away(self: Scheduler, sequence: object) -> None:
        monkeypatch.undo()
        undone.append(freed_and_given_away(engine, sequence.table.ids[1]))
        share(self, sequence)

    undone: list[Callable[[], None]] = []
    monkeypatch.setattr(Scheduler, "share_prefix", given_away)
    handle = engine.submit(PROMPT)
    engine.run_until_idle()
    with pytest.raises(KvTagMismatch):
        handle.result(0)
    assert engine.stats()["pages_cached"] == 0
    undone[0]()
    engine.check_idle()


def test_a_text_that_cannot_be_made_ends_its_request_alone(
    model: LoadedModel, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    add, streams = TextStream.add, list[TextStream]()

    def fails(self: TextStream, token: int) -> str:
        streams.append(self)
        if self is streams[0]:  # the one that came first
            raise Exception("Invalid prefix encountered")
        return add(self, token)

    monkeypatch.setattr(TextStream, "add", fails)
    with engine_of(model) as engine:
        with pytest.raises(RequestFailed, match="could not be made into text"):
            engine.submit(OTHER).result(60)
        assert engine.submit(PROMPT).result(60).tokens == expected
    engine.check_idle()


def test_the_pass_of_an_unknown_error_ends_those_in_it(
    model: LoadedModel, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def secret(*_: object) -> None:
        raise KeyError("process 1234 in /a/secret/path")

    with engine_of(model) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Llama, "logits", secret)
            with pytest.raises(RequestFailed) as raised:
                engine.submit(PROMPT).result(60)
        assert "1234" not in f"{raised.value} {raised.value.remedy}"
        assert engine.submit(PROMPT).result(60).tokens == expected
        assert engine.stats()["passes_failed"] == 1


def test_planning_that_fails_ends_the_one_it_was_for(
    model: LoadedModel, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model)
    errors = [PageNotHeld("planted", remedy="none"), ValueError("planted")]
    match = RadixCache.match

    def fails(self: RadixCache, tokens: object) -> object:
        if errors:
            raise errors.pop(0)
        return match(self, tokens)

    monkeypatch.setattr(RadixCache, "match", fails)
    handles = [engine.submit(request) for request in (OTHER, OTHER, PROMPT)]
    engine.run_until_idle()
    for handle, kind in zip(handles, (KvTagMismatch, RequestFailed), strict=False):
        with pytest.raises(kind):
            handle.result(0)
    assert handles[2].result(0).tokens == expected
    engine.check_idle()


def test_a_sink_that_raises_harms_nobody(model: LoadedModel, expected: tuple[int, ...]) -> None:
    heard: list[Outcome] = []

    def sink(outcome: Outcome) -> None:
        heard.append(outcome)
        raise KeyError("the listener is gone")

    with engine_of(model) as engine:
        deaf = engine.submit(PROMPT, sink)
        assert engine.submit(PROMPT).result(60).tokens == expected
        assert engine.submit(OTHER).result(60)
    assert isinstance(deaf.end, Completion)
    assert [type(outcome) for outcome in heard] == [Delta, Completion]


def test_closing_tells_everybody_whatever_goes_wrong(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sink(_: Outcome) -> None:
        raise KeyError("the listener is gone")

    engine = engine_of(model, running_requests_max=1)
    handles = [engine.submit(OTHER, sink if n == 1 else None) for n in range(4)]
    engine.step()
    removed = iter(range(4))
    remove = Scheduler.remove

    def fails(self: Scheduler, sequence: object) -> tuple[int, ...]:
        gone = remove(self, sequence)
        if next(removed) == 0:
            raise ValueError("planted")
        return gone

    monkeypatch.setattr(Scheduler, "remove", fails)
    engine.close()
    assert [type(handle.end) for handle in handles] == [EngineClosed] * 4
    engine.check_idle()


@contextmanager
def standing(engine: Engine) -> Iterator[Handle]:
    """The engine's thread stands in the middle of a step, in the sink of the request yielded."""
    stands, goes = threading.Event(), threading.Event()

    def sink(_: Outcome) -> None:
        stands.set()
        goes.wait(50)

    handle = engine.submit(PROMPT, sink)
    assert stands.wait(40)
    try:
        yield handle
    finally:
        goes.set()


def test_closing_an_engine_that_hangs_has_a_bound_and_leaves_nobody_waiting(
    model: LoadedModel,
) -> None:
    engine = engine_of(model).start()
    told: list[Outcome] = []
    with standing(engine):
        waiting = engine.submit(OTHER)
        streaming = engine.submit(OTHER, told.append)
        begun = time.monotonic()
        assert not engine.close(0.05)
        assert time.monotonic() - begun < 20
        with pytest.raises(EngineClosed):
            waiting.result(0)
        assert not told, "told by a thread that is not the engine's"
        with pytest.raises(EngineClosed):
            engine.submit(OTHER)
    assert engine.close(40.0)
    assert [type(one) for one in told] == [EngineClosed]
    assert isinstance(streaming.end, EngineClosed)
    engine.check_idle()


def test_an_engine_starts_once(model: LoadedModel) -> None:
    with engine_of(model) as engine, pytest.raises(EngineStarted):
        engine.start()


def test_nothing_is_evicted_for_one_who_is_not_let_in(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, pages=20)
    answers(engine, [PROMPT])  # five pages, cached
    running = engine.submit(greedy(prompt_of(64, seed=3), 40))
    engine.step()
    while not engine.inside.sequence(running).output.tokens:
        engine.step()
    blocked = engine.submit(greedy(prompt_of(100, seed=4), 2))  # 13 of 7 free and 5 cached
    looked = 0
    match = RadixCache.match

    def counted(self: RadixCache, tokens: object) -> object:
        nonlocal looked
        looked += 1
        return match(self, tokens)

    monkeypatch.setattr(RadixCache, "match", counted)
    for _ in range(6):
        engine.step()
    assert running.end is None
    assert engine.stats().get("evicted_pages", 0) == 0
    assert looked <= 2, "the prompt is looked for in every step"
    assert len(engine.inside.cached_pages(PROMPT.prompt)) == PAGES
    engine.run_until_idle()
    assert len(blocked.result(0).tokens) == 2
    engine.check_idle()


def test_a_tiny_temperature_ends_nobody(model: LoadedModel, expected: tuple[int, ...]) -> None:
    engine = engine_of(model)
    sampling = dataclasses.replace(PROMPT.sampling, temperature=2e-38)
    cold = engine.submit(dataclasses.replace(PROMPT, sampling=sampling))
    plain = engine.submit(PROMPT)
    engine.run_until_idle()
    assert cold.result(0).tokens == plain.result(0).tokens == expected
