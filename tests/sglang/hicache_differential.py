"""Random calls of SGLang's controller to two storage backends with the same pools: what they
answer, and the bytes that they bring, have to be the same.

Compared is what the controller makes of an answer: of a get the leading run. Runs in the
environment of `make sglang-env`; one thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from hicache_bench import AttachedBackend, HiCacheBench

from kvtier_sglang.conformance import Server, keys_of, page
from kvtier_sglang.conformance_v2 import Asked

__all__ = ["Differential"]

_PROMPTS, _PAGES, _PLACES = 3, 8, 15


class Differential:
    """`reference` is believed."""

    def __init__(
        self, bench: HiCacheBench, reference: HiCacheBench, *, seed: int, is_latent: bool
    ) -> None:
        sides = ("indexer",) if is_latent else ("swa", "mamba")
        self._server = Server(is_latent=is_latent, sides=sides)
        self._chance = random.Random(seed)
        self._benches = (bench, reference)
        self._attach()
        self._prompts = [keys_of(90 + number, _PAGES) for number in range(_PROMPTS)]
        self._seen = {"hits": 0, "misses": 0, "lengths": 0, "gaps": 0}

    def run(self, steps: int) -> dict[str, Any]:
        """How many pages were hits and misses, how many prefixes could be restored, how many
        answers had a gap between those; and the first `difference`, or None.
        """
        actions = [self._set, self._set_side, self._exists, self._get, self._get_side]
        for number in range(steps):
            action: Callable[[], str | None] = self._chance.choice(actions)
            if self._chance.random() < 0.01:
                action = self._clear
            found = action()
            if found is not None:
                return self._seen | {"difference": f"step {number}: {found}"}
        return self._seen | {"difference": None}

    def _set(self) -> str | None:
        keys, places = self._pages()
        answers = [both[0].set(keys, places) for both in (self._one, self._two)]
        is_set = [answer if isinstance(answer, bool) else all(answer) for answer in answers]
        return None if is_set == [True, True] else f"set of {len(keys)} pages: {answers}"

    def _set_side(self) -> str | None:
        keys, places = self._pages()
        pool = self._chance.choice(self._server.sides)
        answers = [both[0].set_v2(pool, keys, places) for both in (self._one, self._two)]
        return None if answers[0] == answers[1] else f"set of {pool}: {answers}"

    def _exists(self) -> str | None:
        keys = self._chance.choice(self._prompts)[: self._chance.randrange(1, _PAGES + 1)]
        asked = [
            Asked(pool=pool, window=self._chance.choice([None, 0, 1, 2, 3]))
            for pool in self._chance.sample(self._server.sides, len(self._server.sides))
        ]
        answers = [both[1].exists_v2(keys, *asked) for both in (self._one, self._two)]
        lengths = answers[1].lengths or []
        self._seen["lengths"] += len(lengths)
        self._seen["gaps"] += lengths != list(range(1, len(lengths) + 1))
        return None if answers[0] == answers[1] else f"exists of {asked}: {answers}"

    def _get(self) -> str | None:
        keys, places = self._pages()
        runs = [_run(both[1].get(keys, places)) for both in (self._one, self._two)]

        def read(attached: AttachedBackend, place: int) -> torch.Tensor:
            return page(attached, place)

        return self._compared("get", runs, places, read)

    def _get_side(self) -> str | None:
        keys, places = self._pages()
        pool = self._chance.choice(self._server.sides)
        runs = [_run(both[1].get_v2(pool, keys, places)) for both in (self._one, self._two)]

        def read(attached: AttachedBackend, place: int) -> torch.Tensor:
            return attached.side_page(pool, place)

        return self._compared(f"get of {pool}", runs, places, read)

    def _attach(self) -> None:
        # The second of each reads what the first has written, and has other bytes to begin with.
        self._one, self._two = (
            [made.attach(self._server), made.attach(self._server)] for made in self._benches
        )

    def _clear(self) -> None:
        for both in (self._one, self._two):
            both[0].backend.clear()
        # A server that was there before has misses for up to a second.
        self._attach()

    def _compared(
        self,
        what: str,
        runs: list[int],
        places: list[int],
        read: Callable[[AttachedBackend, int], torch.Tensor],
    ) -> str | None:
        self._seen["hits"] += runs[1]
        self._seen["misses"] += len(places) - runs[1]
        if runs[0] != runs[1]:
            return f"{what} of {len(places)} pages: {runs}"
        for place in places[: runs[0]]:
            mine, right = read(self._one[1], place), read(self._two[1], place)
            if not torch.equal(mine.view(torch.uint8), right.view(torch.uint8)):
                return f"{what}: other bytes in page {place}"
        return None

    def _pages(self) -> tuple[list[str], list[int]]:
        """Some pages of a prompt in a row, and a place for each."""
        keys = self._chance.choice(self._prompts)
        begin = self._chance.randrange(_PAGES)
        some = keys[begin : begin + self._chance.randrange(1, 4)]
        return some, self._chance.sample(range(_PLACES), len(some))


def _run(found: list[bool]) -> int:
    return found.index(False) if False in found else len(found)
