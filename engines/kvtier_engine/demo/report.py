"""What the demo claims, whether it held, and how that reads. No claim is about time: that is
measured once, on whatever else the machine does, and shown as a number.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvtier_engine.demo.job import PAGE_TOKENS

__all__ = ["Claim", "Results", "as_json", "as_text", "claims"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One statement about this run. `detail` is what was seen."""

    text: str
    holds: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What the engines have answered: A and B before the crash, C after it, D with a byte flipped
    on the disk.
    """

    begun: dict[str, Any]
    went_on: dict[str, Any]
    revived: dict[str, Any]
    flipped: dict[str, Any]

    @property
    def turns(self) -> list[tuple[str, dict[str, Any]]]:
        """Those that had something to find, in the order in which they were answered."""
        return [
            ("A", self.begun["device"]),
            ("B", self.went_on["host"]),
            ("B, byte flipped in memory", self.went_on["damaged"]),
            ("C, after SIGKILL", self.revived),
            ("D, byte flipped on disk", self.flipped),
        ]


def claims(results: Results) -> list[Claim]:
    """Every claim, from the results of all processes."""
    return [*_claims_of_memory(results), *_claims_of_fp8(results), *_claims_of_nvme(results)]


def _claims_of_memory(results: Results) -> list[Claim]:
    begun, host, damaged = results.begun, results.went_on["host"], results.went_on["damaged"]
    return [
        Claim(
            text="an engine goes on with a chat from its own device pages",
            holds=_is_all_from(begun["device"], "device") and _is_same(begun["device"]),
            detail=_from(begun["device"], "device"),
        ),
        Claim(
            text="every full page of its prompt was stored",
            holds=begun["pages_stored"] == begun["pages"] > 0,
            detail=f"{begun['pages_stored']} of {begun['pages']}",
        ),
        Claim(
            text="an engine in another process gets them from host memory",
            holds=_is_all_from(host, "host"),
            detail=_from(host, "host"),
        ),
        Claim(
            text="it gives the same tokens with the same log probabilities, bit for bit",
            holds=_is_same(host),
            detail=f"{host['tokens_same']} of {host['tokens']} tokens",
        ),
        Claim(
            text="a page with a byte flipped in memory is a miss, and the text is the same",
            holds=_is_one_lost(damaged, "host") and _is_same(damaged),
            detail=f"page {damaged['page']}: {_counted(damaged['loads'])}",
        ),
        Claim(
            text="stored again, it hits again",
            holds=damaged["host_after_storing_it_again"] == damaged["expected_tokens"],
            detail=f"{damaged['host_after_storing_it_again']} tokens from host memory",
        ),
    ]


def _claims_of_fp8(results: Results) -> list[Claim]:
    fp8 = results.went_on["fp8"]
    part = fp8["page_bytes"] / fp8["raw_page_bytes"]
    return [
        Claim(
            text="fp8 pages take half the bytes, and only who accepts them gets them",
            holds=fp8["hits"] == fp8["pages"] > 0
            and part <= 0.51
            and fp8["hits_without_lossy_ok"] == 0,
            detail=f"{part:.4f} of raw",
        )
    ]


def _claims_of_nvme(results: Results) -> list[Claim]:
    fp8, revived, flipped = results.went_on["fp8"], results.revived, results.flipped
    return [
        Claim(
            text="every page was made durable on NVMe",
            holds=fp8["durable"] == fp8["pages"],
            detail=f"{fp8['durable']} of {fp8['pages']}",
        ),
        Claim(
            text="after SIGKILL of the daemon they come back from NVMe, bit for bit",
            holds=_is_all_from(revived, "nvme") and _is_same(revived),
            detail=_from(revived, "nvme"),
        ),
        Claim(
            text="a page with a byte flipped on disk is a miss, and the text is the same",
            holds=_is_one_lost(flipped, "nvme") and _is_same(flipped),
            detail=f"page {flipped['page']}: {_counted(flipped['loads'])}",
        ),
    ]


def _is_same(turn: dict[str, Any]) -> bool:
    return bool(turn["tokens_same"] == turn["tokens"] > 0 and turn["numbers_same_bits"])


def _is_all_from(turn: dict[str, Any], tier: str) -> bool:
    """All that could be found came from there, and nothing from elsewhere."""
    found = turn["cached"]
    return bool(found[tier] == turn["expected_tokens"] == sum(found.values()) > 0)


def _is_one_lost(turn: dict[str, Any], tier: str) -> bool:
    """One page was found damaged; all the others came from there."""
    is_damaged = turn["loads"].get("corrupt") == 1
    return bool(is_damaged and turn["cached"][tier] == turn["expected_tokens"] - PAGE_TOKENS)


def _from(turn: dict[str, Any], tier: str) -> str:
    return f"{turn['cached'][tier]} of {turn['expected_tokens']} tokens"


def _counted(loads: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(loads.items()))


def as_json(results: Results, found: list[Claim], seconds: float) -> dict[str, Any]:
    return {
        "ok": all(claim.holds for claim in found),
        "claims": [asdict(claim) for claim in found],
        **asdict(results),
        "seconds": seconds,
    }


def as_text(results: Results, found: list[Claim], seconds: float) -> str:
    fp8, opening = results.went_on["fp8"], results.begun["opening"]
    heads = ("engine", "prompt", "device", "host", "nvme", "computed", "MB", "first token", "cold")
    rows = [heads, _row("A", opening | {"cold_first_token_seconds": None})]
    rows += [_row(name, turn) for name, turn in results.turns]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    capacity = (
        f"a GiB holds {_capacity(fp8['raw_page_bytes'])} tokens as they are computed,"
        f" {_capacity(fp8['page_bytes'])} as fp8;"
    )
    quality = (
        f"with fp8 {fp8['tokens_same']} of {fp8['tokens']} choices along the answer are the same,"
        f" KL divergence {fp8['kl_mean']:.4f} mean, {fp8['kl_max']:.4f} max (nats)"
    )
    said = [said for role, said in results.went_on["messages"] if role == "assistant"]
    lines = [
        *(f"answer: {' '.join(text.split())!r}" for text in said),
        "",
        "tokens of each prompt by where their KV came from, and the time to the first new one;",
        "cold: all computed. Times are of one run each, the cold one first: numbers, no claim.",
        *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
        "",
        capacity,
        quality,
        "",
        *(f"{'ok  ' if c.holds else 'FAIL'}  {c.text} ({c.detail})" for c in found),
        f"{sum(c.holds for c in found)} of {len(found)} claims hold, {seconds:.0f} s",
    ]
    return "\n".join(lines)


def _row(name: str, turn: dict[str, Any]) -> tuple[str, ...]:
    cached = turn["cached"]
    computed = turn["prompt_tokens"] - sum(cached.values())
    numbers = (turn["prompt_tokens"], cached["device"], cached["host"], cached["nvme"], computed)
    cold = turn["cold_first_token_seconds"]
    return (
        name,
        *map(str, numbers),
        f"{turn['bytes'] / 1e6:.1f}",
        _seconds(turn["first_token_seconds"]),
        "" if cold is None else _seconds(cold),
    )


def _capacity(page_bytes: int) -> int:
    return (1 << 30) // page_bytes * PAGE_TOKENS


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"
