"""How the study reads, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvtier_engine.fidelity.study import Choices, TextStudy, ToolCalls

__all__ = ["Fidelity", "as_json", "as_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """`packed_part`: bytes of a page as packed, over its raw bytes."""

    model: str
    kv_dtype: str
    page_tokens: int
    context_tokens: int
    packed_part: float
    text: TextStudy | None
    questions: Choices | None
    tools: ToolCalls | None


def as_json(study: Fidelity) -> dict[str, Any]:
    """Everything, with what follows from it."""
    made = asdict(study)
    if study.text is not None:
        made["text"] |= {
            "kl_mean_nats": study.text.divergence.kl_mean,
            "token_agreement": study.text.divergence.agreement,
            "perplexity_raw": study.text.raw.perplexity,
            "perplexity_packed": study.text.packed.perplexity,
        }
    return made


def as_text(study: Fidelity) -> str:
    """For people."""
    lines = [
        f"{study.model}, KV in {study.kv_dtype}; fp8 takes {study.packed_part:.4f} of the bytes",
        f"pages of {study.page_tokens} tokens; what is measured follows pages that came back",
        "",
    ]
    if study.text is not None:
        apart = study.text.divergence
        raw, packed = study.text.raw.perplexity, study.text.packed.perplexity
        lines += [
            f"text, {apart.tokens} places behind {study.context_tokens} tokens each",
            f"  KL divergence       {apart.kl_mean:.5f} nats mean, {apart.kl_max:.4f} at most",
            f"  same next token     {apart.agreement:.2%}",
            f"  perplexity          {raw:.4f} raw, {packed:.4f} fp8",
        ]
    if study.questions is not None:
        asked = study.questions
        lines += [
            f"multiple choice, {asked.questions} questions",
            f"  answered right      {asked.raw_right} raw, {asked.packed_right} fp8",
            f"  same answer         {asked.same}",
        ]
    if study.tools is not None:
        calls = study.tools
        lines += [
            f"tool calls, {calls.tasks} tasks",
            f"  valid calls         {calls.raw_valid} raw, {calls.packed_valid} fp8",
            f"  same text           {calls.same_text}",
        ]
    return "\n".join(lines)
