"""What a storage backend of HiCache has to do for side pools (interface v2), as checks that run on
any of them: see kvtier_sglang.conformance.

A page of a side pool counts for the rule its pool has: of all pages, or of the last before the end
of a prefix. One that is absent or damaged makes prefixes shorter, and is never replaced by another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from kvtier_sglang.conformance import Check, NotRun, Server, is_same, keys_of

__all__ = ["SIDE_CHECKS", "Asked", "Hits", "SideAttached", "SideBench"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A side pool in a question; `window` is None for ALL_PAGES, else that of TRAILING_PAGES."""

    pool: str
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """As PoolTransferResult; `by_pool` with names as plain text."""

    pages: int
    by_pool: dict[str, int]
    lengths: list[int] | None


class SideAttached(Protocol):
    """A backend with a primary host pool and side pools, all of random content."""

    backend: Any

    def set(self, keys: list[str], places: list[int]) -> list[bool] | bool:
        """Of the primary pool."""

    def exists_v2(self, keys: list[str], *asked: Asked) -> Hits: ...

    def set_v2(self, pool: str, keys: list[str], places: list[int]) -> list[bool]: ...

    def get_v2(self, pool: str, keys: list[str], places: list[int]) -> list[bool]: ...

    def cut_v2(self, pool: str, keys: list[str]) -> dict[str, list[bool]]:
        """A get with one slot too few; the answer as it is."""

    def side_page(self, pool: str, place: int) -> Any:
        """A copy of the bytes of a page."""


class SideBench(Protocol):
    def attach(self, server: Server) -> SideAttached: ...

    def damage(self, key: str, content: bytes) -> bool: ...


_HEADS: Final = Server(sides=("swa", "mamba"))
_LATENT: Final = Server(is_latent=True, sides=("indexer",))
_EVERY: Final = tuple((server, pool) for server in (_HEADS, _LATENT) for pool in server.sides)


def _come_back(bench: SideBench) -> str | None:
    for number, (server, pool) in enumerate(_EVERY):
        one, other = bench.attach(server), bench.attach(server)
        keys = keys_of(20 + number, 3)
        stored = one.set_v2(pool, keys, [2, 0, 1])
        if stored != [True] * 3:
            return f"set of {pool} answered {stored}"
        if other.get_v2(pool, keys, [3, 4, 5]) != [True] * 3:
            return f"a page of {pool} that was stored is a miss"
        for written, read in zip([2, 0, 1], [3, 4, 5], strict=True):
            if not is_same(one.side_page(pool, written), other.side_page(pool, read)):
                return f"page {written} of {pool} came back with other bytes"
    return None


def _all_pages_rule(bench: SideBench) -> str | None:
    one = bench.attach(_LATENT)
    keys = keys_of(30, 5)
    one.set(keys, [0, 1, 2, 3, 4])
    one.set_v2("indexer", keys[:2], [0, 1])
    one.set_v2("indexer", keys[3:], [3, 4])
    found = one.exists_v2(keys, Asked(pool="indexer"))
    right = Hits(pages=2, by_pool={"kv": 5, "indexer": 2}, lengths=[1, 2])
    return None if found == right else f"{found}, right is {right}"


def _trailing_pages_rule(bench: SideBench) -> str | None:
    one = bench.attach(_HEADS)
    keys = keys_of(31, 6)
    one.set(keys, [0, 1, 2, 3, 4, 5])
    for place in (1, 4):
        one.set_v2("mamba", [keys[place]], [place])
    for place in (0, 1, 3, 4):
        one.set_v2("swa", [keys[place]], [place])
    found = one.exists_v2(keys, Asked(pool="swa", window=2), Asked(pool="mamba", window=1))
    right = Hits(pages=5, by_pool={"kv": 6, "swa": 5, "mamba": 5}, lengths=[2, 5])
    if found != right:
        return f"{found}, right is {right}"
    found = one.exists_v2(keys, Asked(pool="swa", window=3), Asked(pool="mamba", window=1))
    right = Hits(pages=2, by_pool={"kv": 6, "swa": 2, "mamba": 5}, lengths=[2])
    return None if found == right else f"with a wider window {found}, right is {right}"


def _nothing_behind_the_primary_pool(bench: SideBench) -> str | None:
    one = bench.attach(_HEADS)
    keys = keys_of(32, 4)
    one.set(keys[:2], [0, 1])
    one.set_v2("mamba", keys, [0, 1, 2, 3])
    found = one.exists_v2(keys, Asked(pool="mamba", window=1))
    right = Hits(pages=2, by_pool={"kv": 2, "mamba": 2}, lengths=[1, 2])
    return None if found == right else f"{found}, right is {right}"


def _absent_pages_are_misses(bench: SideBench) -> str | None:
    for number, (server, pool) in enumerate(_EVERY):
        one = bench.attach(server)
        keys = keys_of(40 + number, 2)
        one.set_v2(pool, keys[:1], [0])
        answer = one.get_v2(pool, keys, [1, 2])
        if answer != [True, False]:
            return f"get of {pool} answered {answer}"
    return None


def _pools_are_apart(bench: SideBench) -> str | None:
    one = bench.attach(_HEADS)
    keys = keys_of(50, 1)
    one.set(keys, [0])
    if any(one.get_v2(pool, keys, [0])[0] for pool in _HEADS.sides):
        return "a page of the primary pool is given to a side pool"
    one.set_v2("swa", keys, [1])
    if one.get_v2("mamba", keys, [0]) != [False]:
        return "a page of one side pool is given to another"
    return None


def _slots_that_make_no_page_are_misses(bench: SideBench) -> str | None:
    one = bench.attach(_HEADS)
    keys = keys_of(51, 2)
    one.set_v2("swa", keys, [0, 1])
    answer = one.cut_v2("swa", keys)
    return None if answer == {"swa": [False, False]} else f"get answered {answer}"


def _never_shares(pool: str, owner: Server, other: Server) -> Callable[[SideBench], str | None]:
    def check(bench: SideBench) -> str | None:
        keys = keys_of(60, 2)
        bench.attach(owner).set_v2(pool, keys, [0, 1])
        stranger = bench.attach(other)
        if any(stranger.get_v2(pool, keys, [0, 1])):
            return f"its pages of {pool} are given to the other server"
        return None

    return check


def _damage_is_a_miss(bench: SideBench) -> str | None:
    for number, (server, pool) in enumerate(_EVERY):
        one = bench.attach(server)
        keys = keys_of(70 + number, 1)
        one.set_v2(pool, keys, [0])
        content = bytes(one.side_page(pool, 0).flatten()[:64].clone().untyped_storage())
        if not bench.damage(keys[0], content):
            raise NotRun("the bench cannot reach the stored bytes")
        if one.get_v2(pool, keys, [1]) != [False]:
            return f"a page of {pool} with a changed byte counts as a hit"
    return None


def _clear_deletes(bench: SideBench) -> str | None:
    one = bench.attach(_HEADS)
    keys = keys_of(80, 1)
    for pool in _HEADS.sides:
        one.set_v2(pool, keys, [0])
    one.backend.clear()
    left = [pool for pool in _HEADS.sides if one.get_v2(pool, keys, [1]) != [False]]
    return f"pages of {', '.join(left)} are there after clear" if left else None


def _others(pool: str, server: Server) -> tuple[Check[SideBench], ...]:
    changes: dict[str, dict[str, Any]] = {
        "number format": {"side_dtype": "float16"},
        "layers": {"side_layers": 3},
        "weights": {"weight_version": "2"},
        "model": {"model": "other"},
    }
    if not server.is_latent:
        changes["rank"] = {"tp_rank": 1, "tp_size": 2}
    if pool == "indexer":
        del changes["number format"]  # it has bytes
    return tuple(
        Check(
            name=f"{pool}: other {what}",
            body=_never_shares(pool, server, replace(server, **change)),
        )
        for what, change in changes.items()
    )


SIDE_CHECKS: tuple[Check[SideBench], ...] = (
    Check(name="side pages come back", body=_come_back),
    Check(name="a gap in a pool of all pages", body=_all_pages_rule),
    Check(name="a pool of trailing pages", body=_trailing_pages_rule),
    Check(name="no further than the primary pool", body=_nothing_behind_the_primary_pool),
    Check(name="absent side pages are misses", body=_absent_pages_are_misses),
    Check(name="pools are apart", body=_pools_are_apart),
    Check(name="slots that make no page", body=_slots_that_make_no_page_are_misses),
    *(check for server, pool in _EVERY for check in _others(pool, server)),
    Check(name="damage to a side page is a miss", body=_damage_is_a_miss),
    Check(name="clear deletes side pages", body=_clear_deletes),
)
