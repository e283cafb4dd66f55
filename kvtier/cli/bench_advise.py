"""Runs `kvtier bench advise`: the cheapest tiers that reach a hit ratio, a table and a sentence."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

from kvtier.bench.advise import Advice, Choice, Wish, advise
from kvtier.bench.bounds import ceiling
from kvtier.bench.caches import without_numba
from kvtier.bench.capacity import Sizes, parse_tiers
from kvtier.bench.errors import BenchInput
from kvtier.bench.figures import ratios
from kvtier.bench.lru_curve import smallest_lru
from kvtier.bench.prices import parse_memory_prices
from kvtier.bench.replay import ReplayPlan, SimTier, WritePolicy, replay
from kvtier.bench.report import percent, size_text
from kvtier.bench.trace import Trace
from kvtier.cli.bench_model import token_bytes
from kvtier.cli.bench_options import check_numba
from kvtier.cli.bench_trace import load_trace
from kvtier.cli.progress_bar import ProgressBar
from kvtier.cli.table import table
from kvtier.core.policy import POLICIES
from kvtier.core.policy.forecasting import FORECASTING, REFUSING

__all__ = ["run"]

_HELP: Final = "see `kvtier bench advise --help`"
_NAMES: Final = {"gpu": "GPU memory", "host": "host memory", "nvme": "NVMe"}
_EXIT_UNREACHED: Final = 1
_BASIS: Final = (
    "Every size was replayed through the daemon's own policy; hit ratios are of input tokens, from "
    "an empty cache. {smallest} host memory holds at least the longest request. Tier gpu stands "
    "for an engine's own cache."
)
#: Under LRU, in one tier that is bought with none beside it, a larger one finds no less.
_SMALLEST: Final = "Sizes are the smallest within 2 %;"
_SMALLEST_FOUND: Final = (
    "Sizes are the smallest found by halving, within 2 %: a larger cache may find less here, so a "
    "smaller one may do;"
)


def run(arguments: argparse.Namespace) -> int:
    """The exit code. Raises TraceError and BenchInput."""
    prices = parse_memory_prices(arguments.prices)
    targets = _targets(arguments)
    policy, write = _policy(arguments)
    each = token_bytes(arguments)
    if each is None:
        raise BenchInput(
            "prices are of a GiB, and no model says how many bytes a token has",
            remedy="name one with --model, --layout or --bytes-per-token",
        )
    sizes = Sizes(load_trace(arguments), each)
    trace = sizes.trace
    wish = _wish(arguments, sizes, prices, targets)
    most = ratios(trace, ceiling(trace)).cold
    found = Advice(choices=[], best=None, replays=0)
    if arguments.target <= most:
        found = advise(wish, _Replays(trace, policy, write))
    if arguments.json:
        print(json.dumps(_document(arguments, wish, found, most), indent=2))
    else:
        print("\n".join(_lines(arguments, wish, found, most)))
    return 0 if found.choices else _EXIT_UNREACHED


def _targets(arguments: argparse.Namespace) -> dict[SimTier, float]:
    found = {SimTier.NVME: arguments.target}
    for tier, name in ((SimTier.HOST, "memory"), (SimTier.GPU, "gpu")):
        target = getattr(arguments, f"target_{name}")
        if target is not None:
            found[tier] = target
    for target in found.values():
        if not 0 < target <= 1:
            raise BenchInput(f"target {target:g} is not above 0 and up to 1", remedy=_HELP)
    return found


def _policy(arguments: argparse.Namespace) -> tuple[str, WritePolicy]:
    policy, write = arguments.policy, arguments.write or "back"
    for what, name, known in (
        ("policy", policy, [*POLICIES, *(name for name in FORECASTING if name not in REFUSING)]),
        ("write", write, list(WritePolicy)),
    ):
        if name not in known:
            raise BenchInput(f"{what} {name!r} is not known", remedy=f"one of {', '.join(known)}")
    check_numba([policy])
    return policy, WritePolicy(write)


def _wish(
    arguments: argparse.Namespace,
    sizes: Sizes,
    prices: dict[SimTier, float],
    targets: dict[SimTier, float],
) -> Wish:
    trace = sizes.trace
    have = {} if arguments.have is None else parse_tiers(arguments.have, sizes)
    at_most = {} if arguments.at_most is None else parse_tiers(arguments.at_most, sizes)
    _check_bought(prices, have, at_most, targets)
    longest = int(trace.blocks.max())
    most = dict.fromkeys(SimTier, trace.blocks_seen)
    for tier, slots in at_most.items():
        most[tier] = min(most[tier], slots)
    least = dict.fromkeys(SimTier, 1) | {SimTier.HOST: min(longest, most[SimTier.HOST])}
    return Wish(
        targets=targets,
        prices=prices,
        have=have,
        least=least,
        most=most,
        slot_bytes=sizes.bytes_of(1) or 0,
        guess=_guess(trace) if arguments.policy == "lru" else None,
    )


def _check_bought(
    prices: Mapping[SimTier, float],
    have: Mapping[SimTier, int],
    at_most: Mapping[SimTier, int],
    targets: Mapping[SimTier, float],
) -> None:
    """Raises BenchInput for what would change nothing, and for tiers that cannot be."""
    bought = prices.keys() - have.keys()
    if SimTier.NVME in prices.keys() | have.keys() and not prices.keys() | have.keys() >= {
        SimTier.HOST
    }:
        raise BenchInput(
            "nvme without host memory: the daemon has nvme below host alone",
            remedy="give host a price, or --have host=SIZE",
        )
    if not bought:
        raise BenchInput("all that has a price is there already", remedy=_HELP)
    for tier in prices.keys() & have.keys():
        raise BenchInput(
            f"{tier.value} has a price and is there already",
            remedy=f"leave {tier.value} out of --prices or of --have",
        )
    for tier in at_most.keys() - bought:
        raise BenchInput(
            f"--at-most {tier.value}: it is not bought", remedy=f"give {tier.value} a price"
        )
    if SimTier.GPU in bought and SimTier.GPU not in targets:
        raise BenchInput(
            "gpu has a price and no target", remedy="give --target-gpu, or no price of gpu"
        )


def _guess(trace: Trace) -> Callable[[float], int] | None:
    """None without numba: the search takes longer."""
    if without_numba() is not None:
        return None
    return cache(partial(smallest_lru, trace))


class _Replays:
    """Measures by replaying, with a bar for each replay."""

    def __init__(self, trace: Trace, policy: str, write: WritePolicy) -> None:
        self._trace, self._policy, self._write = trace, policy, write
        self._count = 0

    def __call__(self, slots: dict[SimTier, int]) -> dict[SimTier, float]:
        trace = self._trace
        self._count += 1
        bar = ProgressBar(f"replay {self._count}", trace.requests, unit="requests")
        plan = ReplayPlan(slots=slots, policy=self._policy, write=self._write)
        try:
            done = replay(trace, plan, bar.at)
        finally:
            bar.end()
        found, end, before = {}, 0 * done.prefix, 0.0
        for tier, hits in done.hits.items():
            end = end + hits
            cold = ratios(trace, end).cold
            found[tier], before = cold - before, cold
        return found


def _document(
    arguments: argparse.Namespace, wish: Wish, found: Advice, most: float
) -> dict[str, Any]:
    return {
        "kvtier_bench": "advise",
        "format": 1,
        "targets": {tier.value: target for tier, target in wish.targets.items()},
        "prices_per_gib": {tier.value: price for tier, price in wish.prices.items()},
        "ceiling": most,
        "policy": arguments.policy,
        "write": arguments.write or "back",
        "replays": found.replays,
        "basis": _basis(arguments, found),
        "choices": [_plain(wish, choice) for choice in found.choices],
        "best": None if found.best is None else _plain(wish, found.best),
        "sentence": _sentence(arguments, wish, found, most),
    }


def _plain(wish: Wish, choice: Choice) -> dict[str, Any]:
    return {
        "cost": choice.cost,
        "hit_ratio": choice.hit_ratio,
        "tiers": {
            tier.value: {
                "blocks": slots,
                "bytes": slots * wish.slot_bytes,
                "is_there": tier in wish.have,
                "hit_ratio": choice.hits[tier],
            }
            for tier, slots in choice.slots.items()
        },
    }


def _lines(arguments: argparse.Namespace, wish: Wish, found: Advice, most: float) -> Iterator[str]:
    if found.choices:
        header = ("tiers", "cost", "hit", *(f"{tier} hit" for tier in SimTier))
        yield from table(header, [_cells(wish, choice) for choice in found.choices])
        yield ""
        yield f"{_basis(arguments, found)} {found.replays} replays."
        yield ""
    yield _sentence(arguments, wish, found, most)


def _basis(arguments: argparse.Namespace, found: Advice) -> str:
    is_sure = arguments.policy == "lru" and all(len(one.slots) == 1 for one in found.choices)
    return _BASIS.format(smallest=_SMALLEST if is_sure else _SMALLEST_FOUND)


def _cells(wish: Wish, choice: Choice) -> Sequence[str]:
    sizes = [
        f"{tier.value}={size_text(slots * wish.slot_bytes)}" for tier, slots in choice.slots.items()
    ]
    hits = [percent(choice.hits[tier]) if tier in choice.hits else "" for tier in SimTier]
    return (" ".join(sizes), f"{choice.cost:,.2f}", percent(choice.hit_ratio), *hits)


def _sentence(arguments: argparse.Namespace, wish: Wish, found: Advice, most: float) -> str:
    wanted = percent(arguments.target)
    if arguments.target > most:
        return (
            f"No size reaches {wanted}: of these requests' input tokens only {percent(most)} were "
            "ever seen before (the ceiling)."
        )
    if not found.choices:
        best = "" if found.best is None else f"; the most was {percent(found.best.hit_ratio)}"
        return f"Nothing that may be bought reaches {wanted} with the other targets{best}."
    choice = found.choices[0]
    parts = [_part(wish, tier, slots) for tier, slots in choice.slots.items()]
    return (
        f"The cheapest found for {wanted} of input tokens: {' and '.join(parts)}, at "
        f"{choice.cost:,.2f}; that finds {percent(choice.hit_ratio)} of a possible {percent(most)}."
    )


def _part(wish: Wish, tier: SimTier, slots: int) -> str:
    there = " that is there" if tier in wish.have else ""
    return f"{size_text(slots * wish.slot_bytes)} of {_NAMES[tier]}{there}"
