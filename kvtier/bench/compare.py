"""Two results of `kvtier bench hit-ratio --json`, row by row. Pure but for reading the files.

Rows are paired that replayed the same thing, by exact numbers; of those left over, rows of one size
are paired in their order (so a policy can be compared with another); the rest is named as missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.bench.errors import BenchInput
from kvtier.bench.report import FORMAT, token_text
from kvtier.streams import read_bytes

__all__ = ["Comparison", "Pair", "compare", "load_result"]

_BYTES_MAX: Final = 256 << 20
_SILENCE_S: Final = 5.0  # of the other end of a pipe
_REMEDY: Final = "name two files that `kvtier bench hit-ratio --json` of this version has written"
#: Of the ratios of a row: by where they lie in it.
_RATIOS: Final = ("cold", "second_half", "request_mean", "block_weighted")
_TIERS: Final = ("gpu", "host", "nvme")
#: Of a fleet, beside its router and sizes: field and word.
_ROUTING: Final = {"rate_tokens_per_s": "rate", "shared_cost": "shared cost"}
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """`a`, `b`: ratios by name; `points`: 100 * (b - a) of those that both have."""

    name_a: str
    name_b: str
    a: dict[str, float]
    b: dict[str, float]

    @property
    def name(self) -> str:
        return self.name_a if self.name_a == self.name_b else f"{self.name_a} | {self.name_b}"

    @property
    def points(self) -> dict[str, float]:
        return {name: 100 * (self.b[name] - one) for name, one in self.a.items() if name in self.b}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`differs`: what was replayed, where it is not the same: (what, in a, in b)."""

    pairs: list[Pair]
    only_a: list[str]
    only_b: list[str]
    differs: list[tuple[str, str, str]]


def load_result(path: Path) -> dict[str, Any]:
    """The document in a file. Raises BenchInput, naming the file, for what is none."""
    try:
        document = json.loads(read_bytes(path, bytes_max=_BYTES_MAX, silence_s=_SILENCE_S))
    except (ValueError, RecursionError) as error:
        raise BenchInput(f"{path}: no JSON document", remedy=_REMEDY) from error
    if not isinstance(document, dict) or document.get("kvtier_bench") != "hit-ratio":
        raise BenchInput(f"{path}: no result of kvtier bench hit-ratio", remedy=_REMEDY)
    if document.get("format") != FORMAT:
        raise BenchInput(
            f"{path}: a result of format {document.get('format')!r:.40}; this version reads "
            f"{FORMAT}",
            remedy=_REMEDY,
        )
    try:
        for row in document["results"]:
            _ratios(row)
            _name(row)
        _facts(document)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise BenchInput(
            f"{path}: a damaged result ({type(error).__name__}: {error})", remedy=_REMEDY
        ) from error
    return document


def compare(a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    """Of two documents that `load_result` has given."""
    rows_a, rows_b = list(a["results"]), list(b["results"])
    pairs = [*_pair(rows_a, rows_b, _replayed), *_pair(rows_a, rows_b, _sizes)]
    facts_a, facts_b = _facts(a), _facts(b)
    return Comparison(
        pairs=pairs,
        only_a=[_name(row) for row in rows_a],
        only_b=[_name(row) for row in rows_b],
        differs=[
            (name, facts_a.get(name, "-"), facts_b.get(name, "-"))
            for name in dict.fromkeys([*facts_a, *facts_b])
            if facts_a.get(name, "-") != facts_b.get(name, "-")
        ],
    )


def _pair(
    rows_a: list[dict[str, Any]], rows_b: list[dict[str, Any]], key: Callable[[Any], object]
) -> Iterator[Pair]:
    """Takes rows of one key out of both lists."""
    for row_a in list(rows_a):
        for row_b in rows_b:
            if key(row_a) == key(row_b):
                rows_a.remove(row_a)
                rows_b.remove(row_b)
                yield Pair(
                    name_a=_name(row_a), name_b=_name(row_b), a=_ratios(row_a), b=_ratios(row_b)
                )
                break


def _replayed(row: dict[str, Any]) -> object:
    """All that a row was replayed with."""
    if "router" in row:
        more = (row[name] for name in ("router", "affinity_adoption", *_ROUTING))
        return [row["policy"], _sizes(row), *more]
    return [row["policy"], row["write"] if _has_writes(row) else None, _sizes(row)]


def _sizes(row: dict[str, Any]) -> object:
    """In tokens; as they are in the document."""
    if "router" in row:
        return [row["replicas"], row["local_tokens"], row["shared_tokens"]]
    return [(name, tier["capacity_tokens"]) for name, tier in row["tiers"].items()]


def _has_writes(row: dict[str, Any]) -> bool:
    return {"host", "nvme"} <= set(row["tiers"])


def _name(row: dict[str, Any]) -> str:
    """What was replayed in a row."""
    if "router" in row:
        shared = f" + {_tokens(row['shared_tokens'])}" if row["shared_tokens"] else ""
        sent = ""
        if row["router"].startswith("session"):
            sent = f" ({100 * row['affinity_adoption']:g} % send ids)"
        more = ", ".join(f"{word} {row[name]}" for name, word in _ROUTING.items())
        return (
            f"{row['router']}{sent}, {row['policy']}, {row['replicas']} x "
            f"{_tokens(row['local_tokens'])}{shared}, {more}"
        )
    write = f", {row['write']}" if _has_writes(row) else ""
    tiers = row["tiers"].items()
    sizes = " ".join(f"{name}={_tokens(tier['capacity_tokens'])}" for name, tier in tiers)
    return f"{row['policy']}{write}, {sizes}"


def _tokens(count: int) -> str:
    """As 3.5Mtok where that is exact, and to the token where it is not."""
    short = token_text(count)
    number = short.removesuffix("tok")
    factor = {"K": 10**3, "M": 10**6, "G": 10**9}.get(number[-1:], 1)
    is_exact = round(float(number.rstrip("KMG")) * factor) == count
    return short if is_exact else f"{count}tok"


def _ratios(row: dict[str, Any]) -> dict[str, float]:
    if "router" in row:
        names = {"cold": "hit_ratio", "own": "hit_ratio_local", "shared": "hit_ratio_shared"}
        return {name: _ratio(row[key]) for name, key in names.items()}
    found = {name: _ratio(row["hit_ratio"][name]) for name in _RATIOS}
    found |= {
        name: _ratio(row["tiers"][name]["hit_ratio"]) for name in _TIERS if name in row["tiers"]
    }
    found["same_session"] = _ratio(row["same_session"])
    found["optimum"] = _ratio(row["optimum"]["cold"])
    return found


def _ratio(value: float) -> float:
    """Raises TypeError and ValueError for what is none."""
    found = float(value)
    if not 0 <= found <= 1 + _ROUNDING:
        raise ValueError(f"{found:g} is no ratio")
    return found


def _facts(document: dict[str, Any]) -> dict[str, str]:
    """All of the trace and the setup that is no list of numbers."""
    return {
        f"{part} {name}": json.dumps(value)
        for part in ("trace", "setup")
        for name, value in document[part].items()
    }
