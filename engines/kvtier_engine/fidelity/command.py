"""The subcommand `kvtier bench fidelity`. Light: what needs the extra is loaded when it runs."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Final

from kvtier_engine.errors import require_extra

__all__ = ["register"]

_HELP: Final = """\
What storing KV as fp8 does to a model's output: KL divergence, token agreement and perplexity on a
text, accuracy on multiple-choice questions, validity of tool calls; raw beside fp8.

  kvtier bench fidelity
      the small model of `kvtier demo` on a text, questions and tools that come with kvtier
  kvtier bench fidelity --model DIR --text book.txt --context-tokens 4096
      your model on your text (a Hugging Face directory of the Llama family, or a GGUF file)
  kvtier bench fidelity --model DIR --questions arc.jsonl --tools tools.jsonl
      with your tasks; each part that is not wanted is left out with --skip
"""
_SHAPES: Final = """\
a line of questions:
  {"question": "..", "choices": ["..", ".."], "answer": 1}                      (MMLU; or "B")
  {"question": {"stem": "..", "choices": [{"label": "A", "text": ".."}, ..]}, "answerKey": "A"}
a line of tools:
  {"prompt": "..", "tools": [{"name": "..", "parameters": {JSON schema}}, ..]}
"""


def register(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser; called by `kvtier bench` through the entry point kvtier.bench_commands."""
    parser = kinds.add_parser(
        "fidelity",
        help="what fp8 does to a model's output",
        description=_HELP,
        epilog=_SHAPES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--questions", type=Path, metavar="FILE", help="JSON lines")
    parser.add_argument("--tools", type=Path, metavar="FILE", help="JSON lines")
    parser.add_argument("--skip", nargs="+", choices=("text", "questions", "tools"), default=[])
    parser.add_argument("--page-tokens", type=_count, default=16, metavar="N")
    parser.add_argument("--context-tokens", type=_count, default=128, metavar="N")
    parser.add_argument("--rest-tokens", type=_count, default=64, metavar="N")
    parser.add_argument("--windows", type=_count, default=16, metavar="N", help="of text, at most")
    parser.add_argument("--answer-tokens", type=_count, default=64, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0. Raises KvtierError for models, texts and tasks that cannot be used."""
    require_extra()
    # Loads torch, which nobody who asks for another command should wait for.
    made = importlib.import_module("kvtier_engine.fidelity.run")
    return int(made.run(args))


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {1 << 20}")
    return number
