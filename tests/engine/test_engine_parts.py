"""States, sampling, stop texts and the checks of a request: the parts without a network."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from kvtier_engine.errors import EngineInconsistent, InvalidRequest
from kvtier_engine.model.tokens import Tokenizer
from kvtier_engine.sampling import Chooser, choose
from kvtier_engine.schedule.output import Output
from kvtier_engine.schedule.request import EndReason, Sampling
from kvtier_engine.schedule.states import TRANSITIONS, Event, State, after
from tests.engine.engine_rig import END, TOKENIZER, raw_tokenizer


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(State, Event)), ids=lambda value: value.name
)
def test_every_pair_of_state_and_event(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert after(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(EngineInconsistent, match=f"{event.name} of a request .* {state.name}"):
            after(state, event)


def test_every_state_is_reached_and_nothing_leaves_the_last() -> None:
    assert set(TRANSITIONS.values()) | {State.WAITING} == set(State)
    assert not any(state is State.FINISHED for state, _ in TRANSITIONS)


@pytest.mark.parametrize(
    "words",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": "hot"},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_tokens": 0},
        {"seed": 1 << 64},
        {"logprobs": 21},
        {"stop": ("",)},
        {"stop": tuple("abcde")},
    ],
    ids=lambda words: "-".join(words),
)
def test_sampling_outside_its_range_is_refused(words: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(words))):
        Sampling(**words)


LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])


def drawn(count: int = 1500, **words: object) -> Counter[int]:
    chooser = Chooser(Sampling(temperature=1.0, seed=5, **words))
    return Counter(chooser.draw(LOGITS) for _ in range(count))


def test_draws_follow_the_distribution() -> None:
    counts = drawn()
    for token, expected in enumerate(torch.softmax(LOGITS, dim=0).tolist()):
        deviation = math.sqrt(expected * (1 - expected) / 1500)
        assert abs(counts[token] / 1500 - expected) < 5 * deviation


def test_top_k_and_top_p_leave_out_the_unlikely() -> None:
    assert set(drawn(top_k=2)) == {0, 1}
    assert set(drawn(top_p=0.5)) == {0}  # the first has 0.64 already
    assert set(drawn(top_p=0.7)) == {0, 1}
    assert set(drawn(top_k=3, top_p=0.999)) == {0, 1, 2}


def test_a_seed_draws_the_same_again_whoever_shares_the_batch() -> None:
    rows = torch.stack([LOGITS, LOGITS.flip(0), LOGITS * 0.1])
    alone, shared = (Chooser(Sampling(temperature=1.3, seed=9)) for _ in range(2))
    other = Chooser(Sampling(temperature=0.7))
    for _ in range(50):
        (first,) = choose(rows[2:], [alone])
        assert choose(rows, [other, other, shared])[2].token == first.token


def test_greedy_and_logprobs() -> None:
    (choice,) = choose(LOGITS[None], [Chooser(Sampling(logprobs=2))])
    assert choice.token == 0
    assert choice.logprob is not None
    expected = torch.log_softmax(LOGITS, dim=0).tolist()
    assert choice.logprob.logprob == pytest.approx(expected[0])
    assert choice.logprob.top == ((0, pytest.approx(expected[0])), (1, pytest.approx(expected[1])))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_choose_nothing(bad: float) -> None:
    rows = torch.stack([LOGITS, LOGITS])
    rows[0, 3] = bad
    chosen = choose(rows, [Chooser(Sampling()), Chooser(Sampling())])
    assert [choice.token for choice in chosen] == [None, 0]


def output_of(text: str, **words: object) -> tuple[list[str], Output]:
    """What came of each byte of `text`."""
    tokenizer = Tokenizer(raw_tokenizer(), TOKENIZER)
    output = Output(tokenizer.stream(), Sampling(**words), {END}, 1000)
    return [output.add(token) for token in tokenizer.encode(text) if not output.reason], output


def test_text_that_may_be_a_stop_is_held_back() -> None:
    pieces, output = output_of("a STOP, STO! STOPPED", stop=("STOPP",))
    assert pieces[:8] == ["a", " ", "", "", "", "", "STOP,", " "]
    assert output.text == "a STOP, STO! "
    assert output.reason is EndReason.STOP


def test_the_first_of_several_stops_counts() -> None:
    assert output_of("one two three", stop=("three", "wo t"))[1].text == "one t"


def test_whole_characters_come_out() -> None:
    pieces, output = output_of("é€")
    assert pieces == ["", "é", "", "", "€"]
    assert output.text == "é€"


def test_an_end_token_ends_it_and_is_no_text() -> None:
    _, output = output_of("ab")
    assert output.add(END) == ""
    assert (output.text, output.reason) == ("ab", EndReason.STOP)
