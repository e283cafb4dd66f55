"""Runs `kvtier bench fidelity`: loads the model, does each part of the study, prints it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Final, TypeVar

import torch

from kvtier import Codec
from kvtier_engine.errors import InvalidRequest
from kvtier_engine.fidelity import study
from kvtier_engine.fidelity.report import Fidelity, as_json, as_text
from kvtier_engine.fidelity.scorer import Scorer
from kvtier_engine.fidelity.tasks import read_questions, read_tool_tasks
from kvtier_engine.model.load import LoadedModel, load_model
from kvtier_engine.smollm2 import MODEL_ID, ensure_model

__all__ = ["run"]

T = TypeVar("T")

#: Prompts of questions and tool tasks are longer than windows of text.
_PROMPT_TOKENS_MAX: Final = 2048


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises KvtierError, and OSError for files that cannot be read."""
    model = _model(args.model, getattr(torch, args.dtype))
    # Pages are whole: a context is as many of them as there are in what was asked for.
    context = args.context_tokens - args.context_tokens % args.page_tokens
    if not context or args.rest_tokens < 2:
        raise InvalidRequest(
            f"{args.context_tokens} context tokens in pages of {args.page_tokens}, and "
            f"{args.rest_tokens} after them",
            remedy="give at least one page of context and two tokens after it",
        )
    tokens_max = max(context + args.rest_tokens, _PROMPT_TOKENS_MAX)
    tokens_max = min(tokens_max, model.network.config.context_tokens)
    scorer = Scorer(model, page_tokens=args.page_tokens, tokens_max=tokens_max)

    def part(name: str, place: Path | None, default: str, work: Callable[[Path], T]) -> T | None:
        if name in args.skip:
            return None
        if place is not None:
            return work(place)
        with as_file(files("kvtier_engine") / default) as shipped:
            return work(shipped)

    made = Fidelity(
        model=model.name,
        kv_dtype=args.dtype,
        page_tokens=args.page_tokens,
        context_tokens=context,
        packed_part=scorer.layout.payload_bytes(Codec.FP8) / scorer.layout.raw_bytes,
        text=part(
            "text",
            args.text,
            "fidelity/text.txt",
            lambda place: study.on_text(
                scorer,
                model.tokenizer.encode(place.read_text(encoding="utf-8")),
                context=context,
                rest=args.rest_tokens,
                windows=args.windows,
                tell=_told("text"),
            ),
        ),
        questions=part(
            "questions",
            args.questions,
            "fidelity/questions.jsonl",
            lambda place: study.on_questions(
                scorer, read_questions(place), tell=_told("questions")
            ),
        ),
        tools=part(
            "tools",
            args.tools,
            "fidelity/tools.jsonl",
            lambda place: study.on_tools(
                scorer,
                read_tool_tasks(place),
                answer_tokens=args.answer_tokens,
                tell=_told("tools"),
            ),
        ),
    )
    print(json.dumps(as_json(made), indent=1) if args.json else as_text(made))
    return 0


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
