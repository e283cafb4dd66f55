"""What a storage backend of HiCache has to do, as checks that run on any of them.

SGLang has none of its own. A `Bench` says how to attach a backend to a host pool, as a server of
some description would; each check attaches what it needs, moves pages as SGLang's controller does,
and answers with a Verdict. Nothing is known of the backend but its methods.

    for check in CHECKS:
        print(check.name, check.run(bench))

Those of interface v2, for side pools, are in kvtier_sglang.conformance_v2.

One thread. Pages are compared through `get_data_page` of the pool, so that every layout will do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

__all__ = [
    "CHECKS",
    "Attached",
    "Bench",
    "Check",
    "NotRun",
    "Result",
    "Server",
    "Verdict",
    "is_same",
    "keys_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What one server is, as far as it changes what pages mean. `dtype` as torch names it. `sides`
    are its side pools by SGLang's names; with `is_latent` its attention has latents and no heads.
    `side_dtype` and `side_layers` are of the side pools.
    """

    dtype: str = "bfloat16"
    mem_layout: str = "page_first_direct"
    weight_version: str = "1"
    model: str = "model"
    tp_rank: int = 0
    tp_size: int = 1
    is_latent: bool = False
    sides: tuple[str, ...] = ()
    side_dtype: str = "bfloat16"
    side_layers: int = 2


class Attached(Protocol):
    """A backend with a host pool of random content; `pages` of `page_size` slots."""

    backend: Any
    pool: Any
    pages: int
    page_size: int

    def set(self, keys: list[str], places: list[int]) -> list[bool] | bool:
        """As the controller writes: by interface v1 or by the generic calls."""

    def get(self, keys: list[str], places: list[int]) -> list[bool]:
        """As the controller reads."""


class Bench(Protocol):
    def attach(self, server: Server) -> Attached:
        """A server's backend on the one storage of this bench."""

    def damage(self, key: str, content: bytes) -> bool:
        """Changes a byte of a stored page, which begins with `content`, behind the backend's back.
        False: it does not know how.
        """


class Verdict(Enum):
    PASS = "pass"
    FAIL = "fail"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    verdict: Verdict
    reason: str = ""


B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Generic[B]):
    """`B` is the kind of bench that it needs."""

    name: str
    body: Callable[[B], str | None]

    def run(self, bench: B) -> Result:
        """An exception of the backend is a failure: SGLang would lose a thread by it."""
        try:
            found = self.body(bench)
        except NotRun as reason:
            return Result(verdict=Verdict.NOT_RUN, reason=str(reason))
        except (RuntimeError, ValueError, TypeError, LookupError, OSError, AssertionError) as error:
            return Result(verdict=Verdict.FAIL, reason=f"{type(error).__name__}: {error}")
        if found is None:
            return Result(verdict=Verdict.PASS)
        return Result(verdict=Verdict.FAIL, reason=found)


class NotRun(Exception):
    """The bench cannot do what a check needs."""


def keys_of(prompt: int, count: int) -> list[str]:
    """Page hashes: 64 hexadecimal digits."""
    return [f"{prompt:032x}{number:032x}" for number in range(1, count + 1)]


def page(attached: Attached, place: int) -> Any:
    """A copy of the bytes of a page in the pool."""
    return attached.pool.get_data_page(place * attached.page_size).clone()


def is_same(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and one.dtype == other.dtype and one.equal(other))


def _bytes_come_back(bench: Bench) -> str | None:
    one, other = bench.attach(Server()), bench.attach(Server())
    keys = keys_of(1, 4)
    stored = one.set(keys, [3, 0, 2, 1])
    if stored is not True and stored != [True] * 4:
        return f"set answered {stored}"
    if other.get(keys, [4, 5, 6, 7]) != [True] * 4:
        return "a page that was stored is a miss"
    for written, read in zip([3, 0, 2, 1], [4, 5, 6, 7], strict=True):
        if not is_same(page(one, written), page(other, read)):
            return f"page {written} came back with other bytes"
    return None


def _exists_is_a_leading_run(bench: Bench) -> str | None:
    one = bench.attach(Server())
    keys = keys_of(2, 6)
    one.set(keys[:2], [0, 1])
    one.set(keys[3:4], [3])
    found = [one.backend.batch_exists(keys), one.backend.batch_exists(keys[2:])]
    return None if found == [2, 0] else f"batch_exists answered {found}, [2, 0] is right"


def _absent_pages_are_misses(bench: Bench) -> str | None:
    one = bench.attach(Server())
    keys = keys_of(3, 3)
    one.set(keys[:1], [0])
    answer = one.get(keys, [0, 1, 2])
    return None if answer == [True, False, False] else f"get answered {answer}"


def _setting_again_is_fine(bench: Bench) -> str | None:
    one = bench.attach(Server())
    keys = keys_of(4, 2)
    answers = [one.set(keys, [0, 1]) for _ in range(2)]
    is_fine = all(answer is True or answer == [True, True] for answer in answers)
    return None if is_fine else f"set answered {answers}"


def _nothing_for_no_keys(bench: Bench) -> str | None:
    one = bench.attach(Server())
    found = one.backend.batch_exists([])
    return None if found == 0 else f"batch_exists of nothing answered {found}"


def _never_shares(other: Server) -> Callable[[Bench], str | None]:
    def check(bench: Bench) -> str | None:
        keys = keys_of(5, 2)
        bench.attach(Server()).set(keys, [0, 1])
        stranger = bench.attach(other)
        if stranger.backend.batch_exists(keys):
            return "its pages are said to be there for the other server"
        if any(stranger.get(keys, [0, 1])):
            return "its pages are given to the other server"
        return None

    return check


def _damage_is_a_miss(bench: Bench) -> str | None:
    one = bench.attach(Server())
    keys = keys_of(6, 1)
    one.set(keys, [0])
    content = bytes(page(one, 0).flatten()[:64].clone().untyped_storage())
    if not bench.damage(keys[0], content):
        raise NotRun("the bench cannot reach the stored bytes")
    return None if one.get(keys, [1]) == [False] else "a page with a changed byte counts as a hit"


def _statistics_cost_nothing(bench: Bench) -> str | None:
    one = bench.attach(Server())
    for _ in range(100):
        one.backend.get_stats()
    return None


def _clear_deletes(bench: Bench) -> str | None:
    one = bench.attach(Server())
    keys = keys_of(7, 2)
    one.set(keys, [0, 1])
    one.backend.clear()
    if one.backend.batch_exists(keys):
        return "pages are there after clear"
    one.set(keys, [0, 1])
    return None if one.backend.batch_exists(keys) == 2 else "nothing can be stored after clear"


_PLAIN = Server()

CHECKS: tuple[Check[Bench], ...] = (
    Check(name="bytes come back", body=_bytes_come_back),
    Check(name="exists is a leading run", body=_exists_is_a_leading_run),
    Check(name="absent pages are misses", body=_absent_pages_are_misses),
    Check(name="setting again is fine", body=_setting_again_is_fine),
    Check(name="nothing for no keys", body=_nothing_for_no_keys),
    Check(name="other number format", body=_never_shares(replace(_PLAIN, dtype="float16"))),
    Check(name="other byte order", body=_never_shares(replace(_PLAIN, mem_layout="page_first"))),
    Check(name="other weights", body=_never_shares(replace(_PLAIN, weight_version="2"))),
    Check(name="other model", body=_never_shares(replace(_PLAIN, model="other"))),
    Check(name="other rank", body=_never_shares(replace(_PLAIN, tp_rank=1, tp_size=2))),
    Check(name="damage is a miss", body=_damage_is_a_miss),
    Check(name="statistics cost nothing", body=_statistics_cost_nothing),
    Check(name="clear deletes", body=_clear_deletes),
)
