"""What fp8 does to a model's output: the measures, the tasks, and the study of both."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys

import pytest
import torch

from kvtier import Codec
from kvtier.packing import fp8
from kvtier_engine.errors import InvalidRequest, TaskInvalid
from kvtier_engine.fidelity.command import register
from kvtier_engine.fidelity.measures import divergence, likelihood
from kvtier_engine.fidelity.scorer import Scorer
from kvtier_engine.fidelity.study import asked, called, on_questions, on_text, on_tools
from kvtier_engine.fidelity.tasks import (
    Question,
    ToolTask,
    is_valid_call,
    read_questions,
    read_tool_tasks,
)
from kvtier_engine.settings import KvCacheDtype
from tests.engine.engine_rig import PAGE_TOKENS, prompt_of, tiny_model

BOTH = (Codec.RAW, Codec.FP8)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


@pytest.fixture(scope="module")
def scorer():
    return Scorer(tiny_model(), page_tokens=PAGE_TOKENS, tokens_max=256)


def untold(done: int, total: int) -> None:
    pass


def test_divergence_against_numbers_worked_out_by_hand():
    half, other = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    apart = divergence(half, other)
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert apart.kl_mean == pytest.approx(expected, rel=1e-6)
    assert apart.agreement == 1.0
    both = divergence(torch.cat((half, other)), torch.cat((half, -other)))
    assert (both.tokens, both.same_choice) == (2, 1)
    assert both.kl_max > both.kl_mean > 0
    assert divergence(half, half).kl_sum == 0.0


def test_perplexity_of_equal_choices_is_their_number():
    assert likelihood(torch.zeros(5, 8), torch.arange(5)).perplexity == pytest.approx(8.0)


def test_raw_pages_are_left_alone_and_packed_ones_are_what_the_codec_makes(scorer):
    context, rest = prompt_of(4 * PAGE_TOKENS, seed=1), prompt_of(5, seed=2)
    made = scorer.logits(context, [rest, rest[:2]], BOTH)
    again = scorer.logits(context, [rest], (Codec.RAW,))
    assert torch.equal(made[Codec.RAW][0], again[Codec.RAW][0])
    for codec in BOTH:
        # Another number of rows may round otherwise.
        torch.testing.assert_close(made[codec][0][:3], made[codec][1], rtol=1e-4, atol=1e-4)
    # Computed here once more, page by page, with the codec in between.
    other = Scorer(tiny_model(), page_tokens=PAGE_TOKENS, tokens_max=256)
    whole = [*context, *rest]
    raw = other.logits(whole[: len(context)], [rest], (Codec.RAW,))[Codec.RAW][0]
    row = other._pool.rows[0].clone()
    assert not torch.equal(fp8.unpack(other.layout, fp8.pack(other.layout, row)), row)
    assert torch.equal(raw, made[Codec.RAW][0])
    assert torch.equal(made[Codec.FP8][0][0], raw[0]), "the context's own pass saw raw pages"
    assert not torch.equal(made[Codec.FP8][0][1:], raw[1:])
    assert 0 < divergence(raw[1:], made[Codec.FP8][0][1:]).kl_max < 0.5


def test_over_an_fp8_pool_the_context_too_is_computed_upon_fp8_pages(scorer):
    context, rest = prompt_of(4 * PAGE_TOKENS, seed=1), prompt_of(5, seed=2)
    packed = Scorer(
        tiny_model(), page_tokens=PAGE_TOKENS, tokens_max=256, kv_cache=KvCacheDtype.FP8_E4M3
    )
    raw, changed = (
        one.logits(context, [rest], (Codec.RAW,))[Codec.RAW][0] for one in (scorer, packed)
    )
    assert not torch.equal(changed[0], raw[0])
    assert 0 < divergence(raw, changed).kl_max < 0.5


def test_greedy_text_is_that_of_the_logits(scorer):
    context, rest = prompt_of(2 * PAGE_TOKENS, seed=3), prompt_of(3, seed=4)
    made = scorer.greedy(context, rest, BOTH, tokens=6)
    for codec in BOTH:
        chosen = made[codec]
        rows = scorer.logits(context, [[*rest, *chosen]], (codec,))[codec][0]
        assert rows[len(rest) :].argmax(dim=-1).tolist()[: len(chosen)] == chosen
    assert scorer._pool.free_pages == scorer._pool.pages, "every page is given back"


@pytest.mark.parametrize(
    ("context", "rest"),
    [(0, 3), (PAGE_TOKENS - 1, 3), (256, 1), (PAGE_TOKENS, 300)],
)
def test_a_context_that_is_no_whole_pages_or_has_no_room_is_refused(scorer, context, rest):
    with pytest.raises(InvalidRequest, match="tokens"):
        scorer.logits(prompt_of(context, seed=5), [prompt_of(rest, seed=6)], BOTH)


def test_a_text_is_studied_window_by_window(scorer):
    seen = []
    made = on_text(
        scorer,
        prompt_of(100, seed=7),
        context=2 * PAGE_TOKENS,
        rest=9,
        windows=3,
        tell=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert (made.windows, made.divergence.tokens, made.raw.tokens) == (3, 24, 24)
    assert made.divergence.kl_mean > 0
    assert made.raw.perplexity != made.packed.perplexity
    with pytest.raises(InvalidRequest, match="a text of 24 tokens"):
        on_text(scorer, [5] * 24, context=16, rest=9, windows=3, tell=untold)


def test_questions_and_tools_are_counted(scorer):
    # Choices that are all alike: the first one counts as chosen, whatever the network prefers.
    alike = [Question(text=f"q{at}", choices=("a", "a"), answer=int(at == 2)) for at in range(4)]
    tokenizer = scorer.model.tokenizer
    made = on_questions(scorer, asked(tokenizer, alike), tell=untold)
    assert (made.questions, made.raw_right, made.packed_right, made.same) == (4, 3, 3, 4)
    task = ToolTask(prompt="p", tools={"t": {}})
    calls = on_tools(scorer, called(tokenizer, [task]), answer_tokens=4, tell=untold)
    assert (calls.tasks, calls.raw_valid, calls.packed_valid) == (1, 0, 0)


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('{"name": "weather", "arguments": {"city": "Oslo"}}', True),
        ('Sure! {"name": "weather", "arguments": {"city": "Oslo", "days": 3}} done', True),
        ('{"function": {"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}}', True),
        ('{broken {"name": "weather", "arguments": {"city": "Oslo"}}', True),
        ('{"name": "weather", "arguments": {}}', False),
        ('{"name": "weather", "arguments": {"city": 3}}', False),
        ('{"name": "weather", "arguments": {"city": "Oslo", "days": true}}', False),
        ('{"name": "weather", "arguments": {"city": "Oslo", "when": "now"}}', False),
        ('{"name": "storm", "arguments": {"city": "Oslo"}}', False),
        ('{"name": ["weather"], "arguments": {"city": "Oslo"}}', False),
        ('[{"name": "weather"}]', False),
        ("the weather in Oslo", False),
        ("{" * 5000, False),
    ],
)
def test_what_a_valid_tool_call_is(text, is_valid):
    assert is_valid_call(text, {"weather": SCHEMA}) is is_valid


def test_questions_of_both_shapes_are_read(tmp_path):
    place = tmp_path / "q.jsonl"
    lines = [
        {"question": "a", "choices": ["x", "y"], "answer": 1},
        {"question": "b", "choices": ["x", "y"], "answer": "A"},
        {
            "question": {
                "stem": "c",
                "choices": [{"label": "1", "text": "x"}, {"label": "2", "text": "y"}],
            },
            "answerKey": "2",
        },
        {"question": "d", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"},
    ]
    place.write_text("\n\n".join(map(json.dumps, lines)))
    read = read_questions(place)
    assert [(one.text, one.choices, one.answer) for one in read] == [
        ("a", ("x", "y"), 1),
        ("b", ("x", "y"), 0),
        ("c", ("x", "y"), 1),
        ("d", ("x", "y"), 1),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1]",
        '{"question": "a", "choices": ["x"], "answer": 0}',
        '{"question": "a", "choices": ["x", "y"], "answer": 2}',
        '{"question": "a", "choices": ["x", "y"], "answer": "C"}',
        '{"question": "a", "choices": ["x", "y"], "answer": true}',
        '{"question": {"stem": "a"}, "answerKey": "A"}',
        '{"question": 3, "choices": ["x", "y"], "answer": 1}',
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, line):
    place = tmp_path / "q.jsonl"
    place.write_text('{"question": "a", "choices": ["x", "y"], "answer": 1}\n' + line + "\n")
    with pytest.raises(TaskInvalid, match=r"q\.jsonl, line 2"):
        read_questions(place)


@pytest.mark.parametrize(
    "line",
    ['{"prompt": "p"}', '{"prompt": "p", "tools": [{}]}', '{"prompt": 1, "tools": []}']
    + [
        '{"prompt": "p", "tools": [{"name": "t", "parameters": ' + schema + "}]}"
        for schema in ('{"properties": null}', '{"required": 5}', '{"required": [[]]}', "[]")
    ],
)
def test_a_line_that_is_no_tool_task_is_named(tmp_path, line):
    place = tmp_path / "t.jsonl"
    place.write_text(line)
    with pytest.raises(TaskInvalid, match=r"t\.jsonl, line 1"):
        read_tool_tasks(place)
    place.write_text("\n")
    with pytest.raises(TaskInvalid, match="is empty"):
        read_tool_tasks(place)


def test_the_tasks_that_come_with_the_engine_are_sound():
    from importlib.resources import files

    home = files("kvtier_engine") / "fidelity"
    questions = read_questions(home / "questions.jsonl")
    assert {question.answer for question in questions} == {0, 1, 2, 3}, "no place is favoured"
    assert all(task.tools for task in read_tool_tasks(home / "tools.jsonl"))


def test_the_command_says_what_is_wrong_without_a_traceback(tmp_path):
    place = tmp_path / "q.jsonl"
    place.write_text("no json")
    words = ["bench", "fidelity", "--skip", "text", "tools", "--questions", str(place)]
    ended = subprocess.run(
        [sys.executable, "-m", "kvtier", *words], capture_output=True, text=True, timeout=55
    )
    assert ended.returncode == 2
    assert "line 1: no JSON" in ended.stderr
    assert "remedy:" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--page-tokens", "2048"], "0 after|in pages of 2048"),
        (["--rest-tokens", "1"], "1 after them"),
        (["--skip", "text", "questions", "--answer-tokens", "9000"], "tool task 1 with its answer"),
        (["--context-tokens", "9000"], "the text's windows: 9056 tokens"),
        (
            ["--skip", "text", "tools", "--questions", "/dev/zero"],
            "/dev/zero is not a regular file",
        ),
        (["--skip", "text", "tools", "--page-tokens", "512", "--context-tokens", "512"], "a page"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_model_works(words, why, monkeypatch):
    monkeypatch.setattr(Scorer, "logits", None)
    monkeypatch.setattr(Scorer, "greedy", None)
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    arguments = parser.parse_args(["fidelity", *words])
    with pytest.raises(InvalidRequest, match=why):
        arguments.run(arguments)


@pytest.mark.soak
def test_fp8_changes_little_of_the_small_model():
    ended = subprocess.run(
        [sys.executable, "-m", "kvtier", "bench", "fidelity", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    made = json.loads(ended.stdout)
    assert made["packed_part"] < 0.52
    assert made["text"]["kl_mean_nats"] < 0.02
    assert made["text"]["token_agreement"] > 0.9
    assert abs(made["questions"]["raw_right"] - made["questions"]["packed_right"]) <= 2
