"""Requests through the engine: alone and together, preempted, refused, given up, failing."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from kvtier.client.device import DevicePool
from kvtier.errors import DeadlineExceeded, LayoutError
from kvtier_engine.engine import Engine
from kvtier_engine.errors import (
    EngineClosed,
    EngineInconsistent,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    RequestFailed,
)
from kvtier_engine.handle import Outcome
from kvtier_engine.model.load import LoadedModel
from kvtier_engine.schedule.request import Completion, Delta, EndReason, Request, Sampling
from kvtier_engine.settings import layout_of
from tests.engine.dense import Dense
from tests.engine.engine_rig import (
    PAGE_TOKENS,
    answers,
    engine_of,
    greedy,
    prompt_of,
    tiny_model,
)

PROMPTS = [prompt_of(n, seed=n) for n in (3, 8, 9, 16, 17, 40)]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> list[tuple[int, ...]]:
    """The answers without engine and pool."""
    said = []
    for prompt in PROMPTS:
        dense = Dense(model.network, pages=16, page_tokens=PAGE_TOKENS)
        said.append(tuple(token for token, _ in dense.continued(prompt, 12)))
    return said


def test_answers_are_those_of_the_network_alone(
    model: LoadedModel, alone: list[tuple[int, ...]]
) -> None:
    engine = engine_of(model)
    for _ in range(2):  # the second time from the prefix cache
        done = answers(engine, [greedy(prompt, 12) for prompt in PROMPTS])
        assert [one.tokens for one in done] == alone
    assert [one.cached.device for one in done] == [0, 0, 8, 8, 16, 32]
    assert all(one.reason is EndReason.LENGTH for one in done)
    assert engine.stats()["decode_passes"] < 12 * len(PROMPTS)  # they shared passes


def test_what_lay_in_the_pages_before_does_not_matter(
    model: LoadedModel, alone: list[tuple[int, ...]]
) -> None:
    engine = engine_of(model, pages=33)
    (first,) = engine.pool.allocate(1)  # the page of another, which tables are not filled up with
    engine.pool.kv.fill_(torch.nan)
    handles = [engine.submit(greedy(prompt, 12)) for prompt in PROMPTS]
    engine.run_until_idle()
    assert [handle.result(0).tokens for handle in handles] == alone
    engine.pool.free([first])
    engine.check_idle()


def test_chunks_of_several_pages_hit_whole_chunks_alone(
    model: LoadedModel, alone: list[tuple[int, ...]]
) -> None:
    engine = engine_of(model, chunk_pages=2)
    for _ in range(2):
        done = answers(engine, [greedy(prompt, 12) for prompt in PROMPTS])
    assert [one.cached.device for one in done] == [0, 0, 0, 0, 16, 32]
    assert [one.tokens for one in done] == alone


def test_a_hit_that_ends_within_a_chunk_is_cut_to_whole_ones(model: LoadedModel) -> None:
    engine = engine_of(model, chunk_pages=2)
    whole = prompt_of(40, seed=6)
    answers(engine, [greedy(whole, 1)])
    other = greedy((*whole[:24], *prompt_of(20, seed=7)), 12)  # three pages in common
    (done,) = answers(engine, [other])
    assert done.cached.device == 16
    assert done.tokens == answers(engine_of(model, chunk_pages=2), [other])[0].tokens


def test_a_pool_too_small_for_all_preempts_and_answers_the_same(
    model: LoadedModel, alone: list[tuple[int, ...]]
) -> None:
    engine = engine_of(model, pages=9)
    done = answers(engine, [greedy(prompt, 12) for prompt in PROMPTS])
    assert [one.tokens for one in done] == alone
    assert engine.stats()["preemptions"] == sum(one.preemptions for one in done) > 0
    assert engine.stats()["evicted_pages"] > 0


def test_room_is_never_made_with_the_pages_that_were_just_found(model: LoadedModel) -> None:
    """The new prompt ends within a node that nobody else keeps, and needs more than there is."""
    engine = engine_of(model, pages=14)
    prompt = prompt_of(80, seed=3)
    answers(engine, [greedy(prompt, 1)])
    # Held by somebody, so that evicting them from the tree makes no room.
    held = list(engine.inside.cached_pages(prompt))[4:]
    engine.pool.share(held)
    handle = engine.submit(greedy((*prompt[:16], *prompt_of(30, seed=4)), 1))
    for _ in range(3):
        engine.step()
    engine.pool.free(held)
    engine.run_until_idle()
    assert len(handle.result(0).tokens) == 1
    engine.check_idle()


def test_running_requests_are_bounded(model: LoadedModel) -> None:
    engine = engine_of(model, running_requests_max=2)
    handles = [engine.submit(greedy(prompt)) for prompt in PROMPTS]
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.stats()["requests_running"])
    assert most == 2
    assert all(isinstance(handle.end, Completion) for handle in handles)


def test_prefill_and_decode_take_turns(model: LoadedModel) -> None:
    engine = engine_of(model)
    first = engine.submit(greedy(PROMPTS[0], 30))
    engine.step()
    engine.submit(greedy(prompt_of(80, seed=1)))
    _told(first)
    for _ in range(10):
        engine.step()
    # Half of the ten pages were computed, and between them the first request went on.
    assert len(_told(first)) == 5
    engine.run_until_idle()


def _told(handle: object) -> list[Outcome]:
    told = []
    while not handle._outcomes.empty():  # type: ignore[attr-defined]
        told.append(handle._outcomes.get())  # type: ignore[attr-defined]
    return told


def test_streaming_from_a_thread(model: LoadedModel, alone: list[tuple[int, ...]]) -> None:
    with engine_of(model) as engine:
        handle = engine.submit(greedy(PROMPTS[5], 12, logprobs=1))
        deltas = list(handle.deltas(30))
        done = handle.result(30)
    assert tuple(delta.token for delta in deltas) == done.tokens == alone[5]
    assert "".join(delta.text for delta in deltas) == done.text
    assert [delta.logprob for delta in deltas] == list(done.logprobs)
    assert 0 < done.first_token_seconds < 30


def test_a_handle_that_is_read_to_its_end_hangs_nobody(model: LoadedModel) -> None:
    engine = engine_of(model)
    handle = engine.submit(greedy(PROMPTS[2], 3))
    gone = engine.submit(greedy(PROMPTS[1], 3))
    engine.cancel(gone)
    engine.run_until_idle()
    assert len(list(handle.deltas())) == 3
    assert list(handle.deltas()) == []
    assert len(handle.result().tokens) == 3
    for _ in range(2):
        with pytest.raises(RequestCancelled):
            list(gone.deltas())
    silent = engine.submit(greedy(PROMPTS[2], 3), sink=lambda _: None)
    with pytest.raises(InvalidRequest, match="goes to its sink"):
        silent.result()
    engine.run_until_idle()
    assert silent.result().tokens == handle.result().tokens


def test_a_sink_is_told_everything_once(model: LoadedModel) -> None:
    engine, told = engine_of(model), list[Outcome]()
    handle = engine.submit(greedy(PROMPTS[2], 3), sink=told.append)
    engine.run_until_idle()
    assert [type(outcome) for outcome in told] == [Delta, Delta, Delta, Completion]
    assert handle.result(0) is told[-1]


def test_seeded_sampling_is_repeated(model: LoadedModel) -> None:
    sampling = Sampling(max_tokens=20, temperature=0.9, top_p=0.9, seed=4, ignore_end=True)
    request = Request(prompt=PROMPTS[3], sampling=sampling)
    others = [greedy(prompt, 20) for prompt in PROMPTS[:3]]
    (alone,) = answers(engine_of(model), [request])
    assert answers(engine_of(model), [*others, request])[-1].tokens == alone.tokens
    other = dataclasses.replace(request, sampling=dataclasses.replace(sampling, seed=5))
    assert answers(engine_of(model), [other])[0].tokens != alone.tokens


@pytest.mark.parametrize(
    ("request_of", "said"),
    [
        (lambda: Request(prompt=()), "an empty prompt"),
        (lambda: Request(prompt=(4, 260)), "a token outside 0 .. 259"),
        (lambda: greedy(prompt_of(200, seed=1), 57), "do not fit into 256"),
        (lambda: Request(prompt=prompt_of(256, seed=1)), "do not fit into 256"),
    ],
    ids=["empty", "foreign", "too long", "no room"],
)
def test_prompts_that_cannot_be_served(model: LoadedModel, request_of: object, said: str) -> None:
    engine = engine_of(model, pages=32)
    with pytest.raises(InvalidRequest, match=said):
        engine.submit(request_of())  # type: ignore[operator]
    assert not engine.has_work


def test_a_prompt_that_just_fits_is_served(model: LoadedModel) -> None:
    engine = engine_of(model, pages=32)
    done = answers(engine, [greedy(prompt_of(200, seed=1), 56), greedy(PROMPTS[5], 40)])
    assert [len(one.tokens) for one in done] == [56, 40]
    # Without a number it is as many as there is room for.
    sampling = Sampling(ignore_end=True)
    (done_all,) = answers(engine, [Request(prompt=prompt_of(200, seed=1), sampling=sampling)])
    assert len(done_all.tokens) == 56


def test_a_thousand_requests_at_once_are_refused_past_the_bound(model: LoadedModel) -> None:
    engine = engine_of(model, queue_requests_max=50)
    handles, refused = [], 0
    for _ in range(1000):
        try:
            handles.append(engine.submit(greedy(PROMPTS[1], 2)))
        except QueueFull:
            refused += 1
    assert (len(handles), refused) == (50, 950)
    engine.run_until_idle()
    assert {handle.result(0).tokens for handle in handles} == {handles[0].result(0).tokens}
    engine.check_idle()


def test_cancelling_in_every_state(model: LoadedModel) -> None:
    engine = engine_of(model, running_requests_max=2)
    decoding, prefilling, waiting = (engine.submit(greedy(PROMPTS[5], 50)) for _ in range(3))
    other = engine.submit(greedy(PROMPTS[0], 4))
    for _ in range(6):
        engine.step()
    for handle in (waiting, prefilling, decoding, decoding):
        engine.cancel(handle)
    engine.run_until_idle()
    for handle in (waiting, prefilling, decoding):
        with pytest.raises(RequestCancelled):
            handle.result(0)
    assert len(other.result(0).tokens) == 4
    engine.cancel(other)  # too late is no error
    engine.step()
    engine.check_idle()


def test_closing_ends_everybody(model: LoadedModel) -> None:
    engine = engine_of(model).start()
    handle = engine.submit(greedy(PROMPTS[5], 200))
    next(handle.deltas(30))
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed):
        handle.result(0)
    with pytest.raises(EngineClosed):
        engine.submit(greedy(PROMPTS[0]))
    engine.check_idle()


def test_waiting_for_a_token_has_a_limit(model: LoadedModel) -> None:
    handle = engine_of(model).submit(greedy(PROMPTS[0]))
    with pytest.raises(DeadlineExceeded):
        handle.result(0.01)


def test_a_request_whose_numbers_are_none_ends_alone(model: LoadedModel) -> None:
    weights = model.network.weights
    embedding = weights.embedding.clone()
    embedding[77] = torch.nan  # whoever reads this token computes NaN
    network = type(model.network)(
        model.network.config, dataclasses.replace(weights, embedding=embedding)
    )
    engine = engine_of(dataclasses.replace(model, network=network))
    good = tuple(token for token in PROMPTS[5] if token != 77)
    bad = engine.submit(greedy((*good[:20], 77, 5), 4))
    fine = engine.submit(greedy(good, 1))
    engine.run_until_idle()
    with pytest.raises(RequestFailed, match="no numbers"):
        bad.result(0)
    assert len(fine.result(0).tokens) == 1
    engine.check_idle()


def test_a_pass_that_fails_ends_those_in_it(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model)
    with monkeypatch.context() as patch:
        patch.setattr(type(model.network), "logits", _out_of_memory)
        handle = engine.submit(greedy(PROMPTS[0]))
        engine.run_until_idle()
    with pytest.raises(RequestFailed, match="the pass over the network failed"):
        handle.result(0)
    assert len(answers(engine, [greedy(PROMPTS[0])])[0].tokens) == 8


def _out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("out of memory")


def test_many_threads_may_ask(model: LoadedModel, alone: list[tuple[int, ...]]) -> None:
    said: dict[int, tuple[int, ...]] = {}
    with engine_of(model) as engine:

        def ask(number: int) -> None:
            said[number] = engine.submit(greedy(PROMPTS[number], 12)).result(60).tokens

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [said[number] for number in range(len(PROMPTS))] == alone
    engine.check_idle()


def test_check_idle_sees_a_page_that_nobody_gave_back(model: LoadedModel) -> None:
    engine = engine_of(model)
    answers(engine, [greedy(PROMPTS[5])])
    (page,) = engine.pool.allocate(1)
    with pytest.raises(EngineInconsistent, match="pages held"):
        engine.check_idle()
    engine.pool.free([page])
    engine.check_idle()


def test_a_pool_of_another_model_is_refused(model: LoadedModel) -> None:
    pool = engine_of(model).pool
    with pytest.raises(LayoutError, match="weights_revision"):
        Engine(dataclasses.replace(model, revision="another"), pool)
    half = DevicePool(layout_of(tiny_model(torch.bfloat16), page_tokens=PAGE_TOKENS), 4)
    with pytest.raises(LayoutError):
        Engine(model, half)
