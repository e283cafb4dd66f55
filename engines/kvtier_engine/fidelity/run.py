"""Runs `kvtier bench fidelity`: loads the model, does each part of the study, prints it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import torch

from kvtier import Codec
from kvtier_engine.errors import InvalidRequest
from kvtier_engine.fidelity import study
from kvtier_engine.fidelity.report import Fidelity, as_json, as_text
from kvtier_engine.fidelity.scorer import Scorer
from kvtier_engine.fidelity.tasks import (
    Question,
    ToolTask,
    read_questions,
    read_tool_tasks,
)
from kvtier_engine.model.load import LoadedModel, load_model
from kvtier_engine.smollm2 import MODEL_ID, ensure_model

__all__ = ["run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What is to be studied, as tokens; empty where it was skipped. `context` is whole pages."""

    text: Sequence[int]
    context: int
    questions: Sequence[study.Asked]
    tools: Sequence[study.Called]


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises KvtierError, and OSError for files that cannot be read."""
    model = _model(args.model, getattr(torch, args.dtype))
    work = _work(args, model)
    scorer = Scorer(model, page_tokens=args.page_tokens, tokens_max=_tokens_max(args, model, work))
    made = Fidelity(
        model=model.name,
        kv_dtype=args.dtype,
        page_tokens=args.page_tokens,
        context_tokens=work.context,
        packed_part=scorer.layout.payload_bytes(Codec.FP8) / scorer.layout.raw_bytes,
        text=_text(args, scorer, work),
        questions=_questions(scorer, work),
        tools=_tools(args, scorer, work),
    )
    print(json.dumps(as_json(made), indent=1) if args.json else as_text(made))
    return 0


def _work(args: argparse.Namespace, model: LoadedModel) -> _Work:
    # Pages are whole: a context is as many of them as there are in what was asked for.
    context = args.context_tokens - args.context_tokens % args.page_tokens
    if not context or args.rest_tokens < 2:
        raise InvalidRequest(
            f"{args.context_tokens} context tokens in pages of {args.page_tokens}, and "
            f"{args.rest_tokens} after them",
            remedy="give at least one page of context and two tokens after it",
        )
    tokenizer, skip = model.tokenizer, args.skip
    with ExitStack() as until_read:

        def place(given: Path | None, shipped: str) -> Path:
            if given is not None and given.exists() and not given.is_file():
                raise InvalidRequest(
                    f"{given} is not a regular file", remedy="name a file, no folder or pipe"
                )
            home = files("kvtier_engine") / "fidelity"
            return given or until_read.enter_context(as_file(home / shipped))

        text, questions, tools = "", list[Question](), list[ToolTask]()
        if "text" not in skip:
            text = place(args.text, "text.txt").read_text(encoding="utf-8")
        if "questions" not in skip:
            questions = read_questions(place(args.questions, "questions.jsonl"))
        if "tools" not in skip:
            tools = read_tool_tasks(place(args.tools, "tools.jsonl"))
    return _Work(
        text=tokenizer.encode(text) if text else (),
        context=context,
        questions=study.asked(tokenizer, questions),
        tools=study.called(tokenizer, tools),
    )


def _tokens_max(args: argparse.Namespace, model: LoadedModel, work: _Work) -> int:
    """Room for the longest of all. Raises InvalidRequest where the model has none."""
    room = model.network.config.context_tokens
    needs: dict[str, int] = {
        "the text's windows": work.context + args.rest_tokens if work.text else 0
    }
    for number, question in enumerate(work.questions, 1):
        needs[f"question {number} with its examples"] = question.tokens
    for number, task in enumerate(work.tools, 1):
        needs[f"tool task {number} with its answer"] = task.tokens + args.answer_tokens
    for what, tokens in needs.items():
        if tokens > room:
            raise InvalidRequest(
                f"{what}: {tokens} tokens, and the model has {room}",
                remedy="leave it out, or ask for fewer tokens",
            )
    prompts = [len(asked.prompt) for asked in work.questions]
    prompts += [len(called.prompt) for called in work.tools]
    shortest, page = min(prompts, default=args.page_tokens), int(args.page_tokens)
    if shortest < page:
        raise InvalidRequest(
            f"a prompt of {shortest} tokens does not fill a page of {page}",
            remedy="ask for smaller pages with --page-tokens",
        )
    return max(*needs.values(), page + 1)


def _text(args: argparse.Namespace, scorer: Scorer, work: _Work) -> study.TextStudy | None:
    if "text" in args.skip:
        return None
    return study.on_text(
        scorer,
        work.text,
        context=work.context,
        rest=args.rest_tokens,
        windows=args.windows,
        tell=_told("text"),
    )


def _questions(scorer: Scorer, work: _Work) -> study.Choices | None:
    if not work.questions:
        return None
    return study.on_questions(scorer, work.questions, tell=_told("questions"))


def _tools(args: argparse.Namespace, scorer: Scorer, work: _Work) -> study.ToolCalls | None:
    if not work.tools:
        return None
    return study.on_tools(scorer, work.tools, answer_tokens=args.answer_tokens, tell=_told("tools"))


def _model(place: Path | None, dtype: torch.dtype) -> LoadedModel:
    if place is not None:
        return load_model(place, dtype=dtype)
    made = ensure_model()
    return load_model(made.directory, dtype=dtype, revision=made.revision, name=MODEL_ID)


def _told(what: str) -> Callable[[int, int], None]:
    """Progress on one line of a terminal; nothing elsewhere."""
    is_seen = sys.stderr.isatty()

    def tell(done: int, total: int) -> None:
        if is_seen:
            end = "\n" if done == total else ""
            print(f"\r{what}: {done} of {total}", end=end, file=sys.stderr, flush=True)

    return tell
