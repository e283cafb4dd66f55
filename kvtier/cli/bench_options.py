"""What `kvtier bench hit-ratio` was asked for, and what of it does not go together.

An option that would change nothing is refused, and all is refused before the first replay; what
needs no trace is refused before one is read.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.bench.caches import NUMBA_REMEDY, without_numba
from kvtier.bench.errors import BenchInput
from kvtier.bench.plot import check_name
from kvtier.bench.prices import TokenPrices
from kvtier.bench.replay import SimTier, WritePolicy
from kvtier.bench.routing import Router
from kvtier.bench.textbook import TEXTBOOK
from kvtier.cli.bench_model import token_bytes
from kvtier.core.policy import POLICIES
from kvtier.core.policy.forecasting import FORECASTING
from kvtier.errors import MissingExtra

__all__ = ["Options", "check_numba", "check_place", "check_tiers"]

_HELP: Final = "see `kvtier bench hit-ratio --help`"
_BLOCK_TOKENS_MAX: Final = 1 << 30
_PUT_TTL_MIN_S: Final = 1e-3  # what a put can say
_TTL_MAX_S: Final = 1e9
_RATE_MIN: Final = 1e-3
_RATE_MAX: Final = 1e12
_BY_SESSION: Final = (Router.SESSION, Router.SESSION_BOUNDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`token_bytes` None: no model was named."""

    policies: Sequence[str]
    writes: Sequence[WritePolicy]
    routers: Sequence[Router]
    adoption: float
    rate: float
    token_bytes: int | None
    prices: TokenPrices | None
    ttls_s: Sequence[float]
    put_ttl_s: float

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Options:
        """Raises BenchInput for what makes no sense whatever the trace is."""
        for file in (arguments.csv, arguments.plot):
            check_place(file)
        if arguments.plot is not None:
            check_name(arguments.plot)
        _check_numbers(arguments)
        live = (arguments.page_bytes, arguments.speedup, arguments.requests, arguments.plane)
        if any(one is not None for one in live):
            raise BenchInput(
                "--page-bytes, --speedup, --requests and --plane need --live", remedy=_HELP
            )
        writes = ["back"]
        if arguments.write is not None:
            writes = _names(arguments.write, WritePolicy, "write")
        routers = ["rr"]
        if arguments.router is not None:
            routers = _names(arguments.router, Router, "router")
        found = cls(
            policies=_policies(arguments.policy),
            writes=[WritePolicy(name) for name in writes],
            routers=[Router(name) for name in routers],
            adoption=1.0 if arguments.affinity_adoption is None else arguments.affinity_adoption,
            rate=8000.0 if arguments.rate is None else arguments.rate,
            token_bytes=token_bytes(arguments),
            prices=_prices(arguments),
            ttls_s=_seconds("--ttl", arguments.ttl),
            put_ttl_s=_put_ttl(arguments.put_ttl),
        )
        if arguments.replicas is not None:
            _refuse(_against_replicas(arguments, found))
        else:
            _refuse(_without_replicas(arguments, found))
        return found


def check_tiers(
    arguments: argparse.Namespace, options: Options, chosen: Sequence[dict[SimTier, int]]
) -> None:
    """Raises BenchInput for options that do not go with these tiers."""
    if arguments.replicas is not None:
        if arguments.hints:
            raise BenchInput("--replicas tells no --hints", remedy="leave out one of them")
        if any(set(slots) != {SimTier.GPU} for slots in chosen):
            raise BenchInput(
                "with --replicas each has a tier gpu alone",
                remedy="give --tiers gpu=SIZE, and --shared SIZE for what all replicas share",
            )
        return
    several = any(len(slots) > 1 for slots in chosen)
    textbook = [name for name in options.policies if name in TEXTBOOK]
    if several and textbook:
        raise BenchInput(
            f"policy {textbook[0]} is a textbook's, for one tier alone",
            remedy="name one tier, or a policy of the daemon",
        )
    if several and arguments.one_pass:
        raise BenchInput(
            "one pass is for LRU and one tier", remedy="leave out --one-pass, or the rest"
        )
    if arguments.write is not None and not any(
        {SimTier.HOST, SimTier.NVME} <= slots.keys() for slots in chosen
    ):
        raise BenchInput(
            "--write is about nvme below host", remedy="give --tiers host=SIZE,nvme=SIZE"
        )
    if options.put_ttl_s and (textbook or not all(SimTier.HOST in slots for slots in chosen)):
        raise BenchInput(
            "--put-ttl is heeded by host memory under a policy of the daemon",
            remedy="give --tiers host=SIZE and such a policy, or leave out --put-ttl",
        )
    if arguments.hints and not any(name in FORECASTING for name in options.policies):
        raise BenchInput("--hints are heard by gittins alone", remedy="give --policy gittins")
    if arguments.untold and not any(SimTier.GPU in slots and len(slots) > 1 for slots in chosen):
        raise BenchInput(
            "--untold is about tiers below gpu", remedy="give --tiers gpu=SIZE,host=SIZE"
        )


def _put_ttl(text: str | None) -> float:
    found = _seconds("--put-ttl", text)
    if len(found) > 1 or (found and found[0] < _PUT_TTL_MIN_S):
        raise BenchInput("--put-ttl takes one number of seconds, 0.001 or more", remedy=_HELP)
    return found[0] if found else 0.0


def _seconds(name: str, text: str | None) -> Sequence[float]:
    if text is None:
        return ()
    found = []
    for part in text.split(","):
        try:
            seconds = float(part)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < _TTL_MAX_S:
            raise BenchInput(f"{name} {_short(part)!r} is no number of seconds", remedy=_HELP)
        found.append(seconds)
    return found


def _prices(arguments: argparse.Namespace) -> TokenPrices | None:
    cached, uncached = arguments.price_cached, arguments.price_uncached
    if cached is None and uncached is None:
        return None
    if cached is None or uncached is None:
        raise BenchInput(
            "one price without the other", remedy="give --price-cached and --price-uncached"
        )
    return TokenPrices(cached=cached, uncached=uncached)


def _policies(text: str) -> Sequence[str]:
    found = _names(text, [*POLICIES, *FORECASTING, *TEXTBOOK], "policy")
    check_numba(found)
    return found


def check_numba(policies: Sequence[str]) -> None:
    """Raises MissingExtra for policies that are compiled, where they cannot be."""
    forecasting = [name for name in policies if name in FORECASTING]
    missing = without_numba() if forecasting else None
    if missing is not None:
        raise MissingExtra(
            f"policy {forecasting[0]} needs numba, which cannot be used: {missing}",
            remedy=NUMBA_REMEDY,
        )


def _against_replicas(arguments: argparse.Namespace, options: Options) -> Iterable[tuple[str, Any]]:
    textbook = [name for name in options.policies if name in TEXTBOOK]
    forecasting = [name for name in options.policies if name in FORECASTING]
    by_session = any(router in _BY_SESSION for router in options.routers)
    return (
        ("--replicas must be from 1 to 4096", not 1 <= arguments.replicas <= 4096),
        ("--affinity-adoption must be from 0 to 1", not 0 <= options.adoption <= 1),
        (
            f"--rate must be from {_RATE_MIN:g} to {_RATE_MAX:g}",
            not _RATE_MIN <= options.rate <= _RATE_MAX,
        ),
        ("--csv and --plot are for one replica", arguments.csv or arguments.plot),
        ("--replicas needs --tiers gpu=SIZE", not arguments.tiers),
        ("--capacities is for one replica", arguments.capacities is not None),
        ("--one-pass is for one replica", arguments.one_pass),
        ("--write and --untold are for one replica", arguments.write or arguments.untold),
        ("--put-ttl is for one replica", options.put_ttl_s),
        (f"policy {(textbook or [''])[0]} is a textbook's, for one replica", textbook),
        (
            f"policy {(forecasting or [''])[0]} hears of requests, which --replicas does not tell",
            forecasting,
        ),
        (
            "--affinity-adoption needs --router session or session-bounded",
            arguments.affinity_adoption is not None and not by_session,
        ),
    )


def _without_replicas(arguments: argparse.Namespace, options: Options) -> Iterable[tuple[str, Any]]:
    return (
        (
            "--router and --shared need --replicas",
            arguments.router is not None or arguments.shared is not None,
        ),
        (
            "--affinity-adoption and --rate need --replicas",
            arguments.affinity_adoption is not None or arguments.rate is not None,
        ),
        ("one pass is for LRU and one tier", arguments.one_pass and options.policies != ["lru"]),
        (
            "--write and --untold change nothing with --one-pass",
            arguments.one_pass and (arguments.write or arguments.untold),
        ),
        ("--put-ttl changes nothing with --one-pass", arguments.one_pass and options.put_ttl_s),
    )


def _refuse(faults: Iterable[tuple[str, Any]]) -> None:
    for what, is_wrong in faults:
        if is_wrong:
            raise BenchInput(what, remedy=_HELP)


def _check_numbers(arguments: argparse.Namespace) -> None:
    tokens, hours, gap = arguments.block_tokens, arguments.start_hours, arguments.gap_max
    for name, value, is_wrong in (
        ("--block-tokens", tokens, tokens is not None and not 1 <= tokens < _BLOCK_TOKENS_MAX),
        ("--start-hours", hours, hours is not None and not 0 <= hours < 1e6),
        ("--gap-max", gap, gap is not None and not 0 <= gap < 1e9),
    ):
        if is_wrong:
            raise BenchInput(f"{name} is {_short(value)}", remedy=_HELP)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def check_place(file: Path | None) -> None:
    """A file that can be written or made: before the minutes of a replay, not after."""
    if file is None:
        return
    place = file if file.exists() else file.parent
    if place.is_dir() == file.exists() or not os.access(place, os.W_OK):
        raise BenchInput(
            f"{file}: cannot be written", remedy="name a file in a folder that can be written to"
        )
    # What /dev/stdout leads to has no name, and a reader.
    if file.is_fifo() and file.resolve().exists():
        raise BenchInput(f"{file} is a named pipe", remedy="name a regular file, or /dev/stdout")


def _names(text: str, known: Any, what: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    wrong = [name for name in names if name not in list(known)]
    if wrong or not names:
        raise BenchInput(
            f"{what} {(wrong or [text])[0]!r} is not known",
            remedy=f"one or more, with commas, of {', '.join(known)}",
        )
    return names
