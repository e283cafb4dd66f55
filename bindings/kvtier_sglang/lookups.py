"""Which pages are there, asked of the namespaces of a page's objects within the time that is left.

Promise: a page counts as there when each of its objects is; what could not be asked in time counts
as absent. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import kvtier
from kvtier.client import Namespace
from kvtier_sglang.budget import Budget

__all__ = ["leading_run", "presence"]

_FIRST: Final = 256
_MAX: Final = 8192


def leading_run(
    namespaces: Sequence[Namespace],
    hashes: Sequence[str],
    budget: Budget,
    goes_on: Callable[[], bool],
    *,
    lossy_ok: bool,
) -> int:
    """How many pages from the first on are there. `goes_on` says whether asking still makes sense;
    without `lossy_ok` a page that the daemon has rounded is not there.

    SGLang asks for all pages of a prompt at once, 16,384 for a million tokens, and a run ends early
    more often than not: so a few are looked up first, then ever more.
    """
    done, step = 0, _FIRST
    while done < len(hashes) and goes_on():
        some = namespaces[0].keys_from(hashes[done : done + step])
        count = len(some)
        for namespace in namespaces:
            if not count or budget.left <= 0:
                return done
            count = namespace.lookup(some[:count], lossy_ok=lossy_ok, deadline=budget.left).prefix
        done += count
        if count < len(some):
            break
        step = min(4 * step, _MAX)
    return done


def presence(
    namespaces: Sequence[Namespace],
    hashes: Sequence[str],
    budget: Budget,
    goes_on: Callable[[], bool],
    *,
    lossy_ok: bool,
) -> list[bool]:
    """Of each page whether it is there, wherever there are gaps; see `leading_run`."""
    there = [False] * len(hashes)
    if not namespaces:
        return there
    for begin in range(0, len(hashes), _MAX):
        some = namespaces[0].keys_from(hashes[begin : begin + _MAX])
        places = list(range(len(some)))
        for namespace in namespaces:
            if not places:
                break
            if budget.left <= 0 or not goes_on():
                return there
            asked = [some[place] for place in places]
            reasons = namespace.lookup(asked, lossy_ok=lossy_ok, deadline=budget.left).reasons
            places = [
                place
                for place, reason in zip(places, reasons, strict=True)
                if reason is kvtier.GetCode.HIT
            ]
        for place in places:
            there[begin + place] = True
    return there
