"""What the demo claims, whether it held, and how that reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Claim", "Results", "as_json", "as_text", "claims"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One statement about this run. `detail` is what was seen."""

    text: str
    holds: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What the processes have answered: before the crash, after it, and with a byte flipped."""

    prefill: dict[str, Any]
    decode: dict[str, Any]
    crashed: dict[str, Any]
    flipped: dict[str, Any]


def claims(results: Results) -> list[Claim]:
    """Every claim, from the results of all processes."""
    return [*_claims_of_memory(results.prefill, results.decode), *_claims_of_nvme(results)]


def _claims_of_memory(prefill: dict[str, Any], decode: dict[str, Any]) -> list[Claim]:
    pages = decode["pages"]
    raw, fp8, damaged = decode["raw"], decode["fp8"], decode["damaged"]
    uncached = decode["uncached"]["first_token_seconds"]
    return [
        Claim(
            text="every full page was stored, raw and packed",
            holds=prefill["raw_stored"] == prefill["fp8_stored"] == pages > 0,
            detail=f"{prefill['raw_stored']} and {prefill['fp8_stored']} of {pages}",
        ),
        Claim(
            text="another process got them all from host memory",
            holds=raw["hits"] == pages and raw["tiers"] == {"HOST": pages},
            detail=f"{raw['hits']} of {pages}, tiers {raw['tiers']}",
        ),
        Claim(
            text="raw pages give the same tokens and the same logits, bit for bit",
            holds=raw["tokens_same"] == raw["tokens"] and raw["logits_same_bits"],
            detail=f"{raw['tokens_same']} of {raw['tokens']} tokens",
        ),
        Claim(
            text="the first token comes sooner than by computing it",
            holds=raw["first_token_seconds"] < uncached,
            detail=f"{uncached / raw['first_token_seconds']:.1f} times",
        ),
        Claim(
            text="fp8 pages take half the bytes, and only who accepts them gets them",
            holds=fp8["hits"] == pages
            and fp8["bytes"] <= 0.51 * raw["bytes"]
            and fp8["hits_without_lossy_ok"] == 0,
            detail=f"{fp8['bytes'] / raw['bytes']:.4f} of raw",
        ),
        Claim(
            text="a page with one flipped byte is not served, and the text is still right",
            holds=damaged["page_reason"] == "CORRUPT"
            and damaged["hits"] == damaged["page"]
            and damaged["tokens_same"] == damaged["tokens"]
            and damaged["logits_same_bits"],
            detail=f"page {damaged['page']} was {damaged['page_reason']},"
            f" {damaged['tokens_same']} of {damaged['tokens']} tokens",
        ),
        Claim(
            text="put again, it hits again",
            holds=damaged["hits_after_putting_it_again"] == pages,
            detail=f"{damaged['hits_after_putting_it_again']} of {pages}",
        ),
    ]


def _claims_of_nvme(results: Results) -> list[Claim]:
    pages = results.decode["pages"]
    durable = results.decode["damaged"]["durable"]
    crashed, flipped = results.crashed, results.flipped
    return [
        Claim(
            text="every page was made durable on NVMe",
            holds=durable == pages,
            detail=f"{durable} of {pages}",
        ),
        Claim(
            text="after SIGKILL they come back from NVMe, and the text goes on, bit for bit",
            holds=crashed["hits"] == pages
            and crashed["tiers"] == {"NVME": pages}
            and crashed["tokens_same"] == crashed["tokens"]
            and crashed["logits_same_bits"],
            detail=f"{crashed['hits']} of {pages}, tiers {crashed['tiers']}",
        ),
        Claim(
            text="a page with one byte flipped on disk is a miss, and the text is still right",
            holds=flipped["reasons"] == {"HIT": pages - 1, "CORRUPT": 1}
            and flipped["hits"] == flipped["page"]
            and flipped["tokens_same"] == flipped["tokens"]
            and flipped["logits_same_bits"],
            detail=f"page {flipped['page']}: {flipped['reasons']}",
        ),
    ]


def as_json(results: Results, found: list[Claim], seconds: float) -> dict[str, Any]:
    return {
        "ok": all(claim.holds for claim in found),
        "claims": [asdict(claim) for claim in found],
        **asdict(results),
        "seconds": seconds,
    }


def as_text(results: Results, found: list[Claim], seconds: float) -> str:
    prefill, decode = results.prefill, results.decode
    uncached = decode["uncached"]
    rows: list[tuple[str, ...]] = [
        ("", "pages hit", "MB", "from", "first token", "tokens as uncached")
    ]
    rows.append(("computed", "", "", "", _seconds(uncached["first_token_seconds"]), ""))
    rows += [
        _row(name, result, decode["pages"])
        for name, result in (
            ("raw", decode["raw"]),
            ("fp8", decode["fp8"]),
            ("raw, byte flipped", decode["damaged"]),
            ("after SIGKILL", results.crashed),
            ("byte flipped on disk", results.flipped),
        )
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    fp8 = decode["fp8"]
    lines = [
        f"prompt: {prefill['prompt_tokens']} tokens, {prefill['pages']} full pages",
        f"answer: {uncached['text'].strip()!r}",
        "",
        *table,
        "",
        f"fp8 along the uncached tokens: {fp8['tokens_same']} of {fp8['tokens']} choices the same;",
        f"KL divergence of next tokens {fp8['kl_mean']:.4f} mean, {fp8['kl_max']:.4f} max (nats)",
        "",
        *(f"{'ok  ' if c.holds else 'FAIL'}  {c.text} ({c.detail})" for c in found),
        f"{sum(c.holds for c in found)} of {len(found)} claims hold, {seconds:.0f} s",
    ]
    return "\n".join(lines)


def _row(name: str, result: dict[str, Any], pages: int) -> tuple[str, ...]:
    return (
        name,
        f"{result['hits']} of {pages}",
        f"{result['bytes'] / 1e6:.1f}",
        ", ".join(tier.lower() for tier in result["tiers"]),
        _seconds(result["first_token_seconds"]),
        f"{result['tokens_same']} of {result['tokens']}",
    )


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"
