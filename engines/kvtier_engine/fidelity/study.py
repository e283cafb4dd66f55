"""The study: a text, questions and tool tasks, each with raw KV and with KV that was stored packed.

Text: windows of context and continuation; the continuation is fed token by token as it stands
(teacher forcing), so that both sides are asked about the same places. Questions: few-shot; the
choice counts as the answer whose tokens cost the fewest nats a character of it. Tool tasks: the
likeliest text, up to a length.

What is asked is made into tokens first (`asked`, `called`), so that what does not fit is refused
before a model has worked for minutes. One thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvtier import Codec
from kvtier_engine.errors import InvalidRequest
from kvtier_engine.fidelity.measures import Divergence, Likelihood, divergence, likelihood
from kvtier_engine.fidelity.scorer import Scorer
from kvtier_engine.fidelity.tasks import Question, ToolTask, is_valid_call
from kvtier_engine.model.tokens import Tokenizer

__all__ = [
    "SHOTS",
    "Asked",
    "Called",
    "Choices",
    "TextStudy",
    "ToolCalls",
    "asked",
    "called",
    "on_questions",
    "on_text",
    "on_tools",
]

#: Questions with their answers that stand before each question.
SHOTS: Final = 4
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_TOOLS_SYSTEM: Final = (
    'You can call these tools. Answer with one JSON object {"name": .., "arguments": {..}} and '
    "nothing else.\n"
)
_BOTH: Final = (Codec.RAW, Codec.FP8)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStudy:
    """Over all windows."""

    windows: int
    divergence: Divergence
    raw: Likelihood
    packed: Likelihood


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Questions answered right, and how many got the same answer both times."""

    questions: int
    raw_right: int
    packed_right: int
    same: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalls:
    """Answers that are calls of a tool that there is, with arguments that it takes."""

    tasks: int
    raw_valid: int
    packed_valid: int
    same_text: int


def on_text(
    scorer: Scorer, tokens: Sequence[int], *, context: int, rest: int, windows: int, tell: Progress
) -> TextStudy:
    """`windows` windows of `context` + `rest` tokens at most, from the beginning of the text on.

    Raises InvalidRequest for a text that has no whole window.
    """
    size = context + rest
    count = min(windows, len(tokens) // size)
    if not count:
        raise InvalidRequest(
            f"a text of {len(tokens)} tokens, and windows of {size}",
            remedy="give a longer text, or ask for fewer context tokens",
        )
    apart: list[Divergence] = []
    sides: dict[Codec, list[Likelihood]] = {codec: [] for codec in _BOTH}
    for number in range(count):
        window = tokens[number * size : (number + 1) * size]
        before, after = window[:context], window[context:]
        made = scorer.logits(before, [after[:-1]], _BOTH)
        # The first row comes from the context's own pass, which nothing has touched.
        raw, packed = (made[codec][0][1:] for codec in _BOTH)
        apart.append(divergence(raw, packed))
        for codec, logits in zip(_BOTH, (raw, packed), strict=True):
            sides[codec].append(likelihood(logits, torch.tensor(after[1:])))
        tell(number + 1, count)
    return TextStudy(
        windows=count,
        divergence=Divergence.of_all(apart),
        raw=Likelihood.of_all(sides[Codec.RAW]),
        packed=Likelihood.of_all(sides[Codec.FP8]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question as tokens. `letters`: the characters of each choice; `answer`: the right one."""

    prompt: Sequence[int]
    choices: Sequence[Sequence[int]]
    letters: Sequence[int]
    answer: int

    @property
    def tokens(self) -> int:
        return len(self.prompt) + max(map(len, self.choices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A tool task as tokens."""

    prompt: Sequence[int]
    task: ToolTask

    @property
    def tokens(self) -> int:
        return len(self.prompt)


def asked(tokenizer: Tokenizer, questions: Sequence[Question]) -> list[Asked]:
    """Each question after up to SHOTS others with their answers."""
    return [
        Asked(
            prompt=tokenizer.encode(_prompt(questions, number)),
            choices=[tokenizer.encode(f" {choice}", special=False) for choice in question.choices],
            letters=[len(choice) for choice in question.choices],
            answer=question.answer,
        )
        for number, question in enumerate(questions)
    ]


def called(tokenizer: Tokenizer, tasks: Sequence[ToolTask]) -> list[Called]:
    """Each task as a chat. Raises InvalidRequest for a model without a chat template."""
    made = []
    for task in tasks:
        schemas = [{"name": name, "parameters": schema} for name, schema in task.tools.items()]
        messages = [
            {"role": "system", "content": _TOOLS_SYSTEM + json.dumps(schemas)},
            {"role": "user", "content": task.prompt},
        ]
        prompt = tokenizer.encode(tokenizer.chat(messages), special=False)
        made.append(Called(prompt=prompt, task=task))
    return made


def on_questions(scorer: Scorer, questions: Sequence[Asked], *, tell: Progress) -> Choices:
    """Raises InvalidRequest for a question that does not fit into the scorer's tokens."""
    right = dict.fromkeys(_BOTH, 0)
    same = 0
    for number, question in enumerate(questions):
        whole = scorer.whole_pages(len(question.prompt))
        before = len(question.prompt) - whole
        rests = [[*question.prompt[whole:], *choice] for choice in question.choices]
        made = scorer.logits(question.prompt[:whole], rests, _BOTH)
        chosen = {}
        for codec in _BOTH:
            costs = [
                likelihood(logits[before:-1], torch.tensor(choice)).nats / letters
                for logits, choice, letters in zip(
                    made[codec], question.choices, question.letters, strict=True
                )
            ]
            chosen[codec] = costs.index(min(costs))
            right[codec] += chosen[codec] == question.answer
        same += chosen[Codec.RAW] == chosen[Codec.FP8]
        tell(number + 1, len(questions))
    return Choices(
        questions=len(questions),
        raw_right=right[Codec.RAW],
        packed_right=right[Codec.FP8],
        same=same,
    )


def on_tools(
    scorer: Scorer, tasks: Sequence[Called], *, answer_tokens: int, tell: Progress
) -> ToolCalls:
    """Raises InvalidRequest for a task that does not fit into the scorer's tokens."""
    tokenizer = scorer.model.tokenizer
    valid = dict.fromkeys(_BOTH, 0)
    same = 0
    for number, task in enumerate(tasks):
        prompt, whole = task.prompt, scorer.whole_pages(len(task.prompt))
        made = scorer.greedy(prompt[:whole], prompt[whole:], _BOTH, tokens=answer_tokens)
        for codec in _BOTH:
            valid[codec] += is_valid_call(tokenizer.decode(made[codec]), task.task.tools)
        same += made[Codec.RAW] == made[Codec.FP8]
        tell(number + 1, len(tasks))
    return ToolCalls(
        tasks=len(tasks),
        raw_valid=valid[Codec.RAW],
        packed_valid=valid[Codec.FP8],
        same_text=same,
    )


def _prompt(questions: Sequence[Question], number: int) -> str:
    """The question after up to SHOTS others with their answers, the same ones at every call."""
    shots = min(SHOTS, len(questions) - 1)
    others = [questions[(number + 1 + step) % len(questions)] for step in range(shots)]
    solved = [f"{_stated(other)} {other.choices[other.answer]}\n\n" for other in others]
    return "".join(solved) + _stated(questions[number])


def _stated(question: Question) -> str:
    lines = [f"{_LETTERS[at % len(_LETTERS)]}. {text}" for at, text in enumerate(question.choices)]
    return "\n".join([f"Question: {question.text}", *lines, "Answer:"])
