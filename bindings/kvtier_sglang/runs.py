"""A batch of pages moved part by part, in runs of some of them.

Promise: what counts is whole pages, the first ones, also when the time is up in the middle: a run
is moved of all parts before the next one begins. Pure functions; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtier import LayoutError
from kvtier_sglang.budget import Budget

__all__ = ["Run", "cut", "in_runs"]

#: Of a run, all parts together. Each part's turn ends with a wait for the daemon, so runs are long;
#: at 0.2 GB/s, which is slow for gRPC, one still ends within the usual deadline.
_RUN_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`total` pages of `page_bytes` in `parts` objects each."""

    parts: int
    page_bytes: int
    total: int


def in_runs(
    run: Run,
    budget: Budget,
    ask: Callable[[int, int, int], int],
    goes_on: Callable[[], bool],
) -> int:
    """How many pages from the first on all parts have or took. `ask` is for a part and a range of
    pages, and says how many from the range's first on; `goes_on` says whether asking makes sense.
    """
    step = max(1, _RUN_BYTES // run.page_bytes)
    done = 0
    while done < run.total and goes_on():
        end = whole = min(done + step, run.total)
        for number in range(run.parts):
            if end == done or budget.left <= 0:
                return done
            end = done + ask(number, done, end)
        done = end
        if end < whole:
            break
    return done


def cut(pages: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Flat pages in pieces of `lengths`: for each length a list with its piece of every page.
    Raises LayoutError for a page that is longer or shorter than all of them: it is of another pool.
    """
    whole = (sum(lengths),)
    for page in pages:
        if tuple(page.shape) != whole:
            raise LayoutError(
                f"a page of shape {tuple(page.shape)}, of this pool it would be {whole}",
                remedy="pass what get_data_page and get_dummy_flat_data_page of the pool give",
            )
    pieces = []
    begin = 0
    for length in lengths:
        pieces.append([page[begin : begin + length] for page in pages])
        begin += length
    return pieces
