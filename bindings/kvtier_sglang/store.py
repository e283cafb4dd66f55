"""Pages of one host pool, to and from a kvtier daemon.

Promise: every method answers within its deadline, for each key; a page counts as there when each of
its objects is, and as got when each was verified where it now lies in the pool. What a get does not
report may hold anything. When a method has returned, nothing reads or writes the pool any more.
Between `pause` and `resume` everything is a miss, and what a call that began before the pause still
stores belongs to the weights before. A resume that the daemon refuses is tried again once a second,
by whatever call comes next.

The copies are made by the calling thread where the daemon's memory is shared, else by the
connection's; either way the client waits for its own writes. A daemon that has gone silent is asked
again once a second at most (the connection sees to that), and the rest are misses at once.

SGLang calls from three threads, one each for exists, get and set; any thread may.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import kvtier
from kvtier import Layout
from kvtier.client import Connection, Namespace
from kvtier_sglang.at_rest import AtRest
from kvtier_sglang.budget import Budget
from kvtier_sglang.layouts import PartLayout
from kvtier_sglang.leaving import Leaving, Left
from kvtier_sglang.lookups import leading_run, presence
from kvtier_sglang.meters import Meter
from kvtier_sglang.options import Options
from kvtier_sglang.runs import Run, cut, in_runs
from kvtier_sglang.states import StoreState

if TYPE_CHECKING:
    import torch

__all__ = ["PageStore", "StoreState"]

log = logging.getLogger(__name__)

_REOPEN_S: Final = 1.0
#: A flat page's memory is cut into objects in the order of the parts.
_Memory = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One object of each page: where it goes by name, and its place in the pool."""

    namespace: Namespace
    rows: torch.Tensor
    #: None where the daemon was not there when it was opened.
    first_generation: int | None

    @property
    def left(self) -> Left:
        now = self.namespace.generation
        first = now if self.first_generation is None else self.first_generation
        return Left(layout=self.namespace.layout, first_generation=first, generation=now)


class PageStore:
    """`rows` are the pool's buffers, one for each of `parts`, with the pages first."""

    def __init__(
        self,
        connection: Connection,
        parts: Sequence[PartLayout],
        rows: Sequence[torch.Tensor],
        options: Options,
    ) -> None:
        """Opens the namespaces if the daemon is there. Raises LayoutError, NamespaceMismatch."""
        self._connection = connection
        self._options = options
        self._salt = options.salt.encode()
        self._at_rest = AtRest.of(options.at_rest)
        #: Whether pages that were rounded are hits here.
        self.takes_lossy = self._at_rest.accepted is not None
        self._layouts = self._at_rest.layouts([part.layout for part in parts])
        self._rows = [rows[part.buffer] for part in parts]
        self._leaving = Leaving(connection, tenant=options.tenant, salt=self._salt)
        self._reopening = threading.Lock()
        self._reopens_at = 0.0
        self._is_refused = False
        #: Between the thread that pauses and one that opens: what was opened meanwhile is not used.
        self._switching = threading.Lock()
        self._is_wanted = True
        self._switches = 0
        self._opens_at = 0.0
        self._opening = threading.Lock()
        #: Of the weights that are served, or were before the pause.
        self._bound: list[_Part] = self._opened(self._layouts, options.get_deadline)
        #: None while paused. A call looks once, and goes on with what it saw.
        self._parts: list[_Part] | None = self._bound
        self.page_bytes = sum(layout.raw_bytes for layout in self._layouts)
        self._part_bytes = [layout.payload_bytes(self._at_rest.codec) for layout in self._layouts]
        self.got = Meter()
        self.put = Meter()

    @property
    def state(self) -> StoreState:
        if self._parts is None:
            return StoreState.WAITING if self._is_wanted else StoreState.PAUSED
        return StoreState.REFUSED if self._is_refused else StoreState.OPEN

    @property
    def families(self) -> tuple[bytes, ...]:
        """Fingerprints of what is served now, one for each part; none while nothing is."""
        parts = self._parts if self.state is StoreState.OPEN else None
        return tuple(part.namespace.fingerprint for part in parts or ())

    def exists(self, hashes: Sequence[str], budget: Budget | None = None) -> int:
        """How many pages from the first on are there now. Here and below, `budget` is the time of a
        call over several stores.
        """
        return leading_run(*self._asked(hashes, budget), lossy_ok=self.takes_lossy)

    def present(self, hashes: Sequence[str], budget: Budget | None = None) -> list[bool]:
        """Of each page whether it is there now, also behind gaps."""
        return presence(*self._asked(hashes, budget), lossy_ok=self.takes_lossy)

    def get(
        self, hashes: Sequence[str], places: Sequence[int], budget: Budget | None = None
    ) -> list[bool]:
        """Pages to these places of the pool. After the first miss everything counts as one."""
        return self._get(hashes, [(rows, places) for rows in self._rows], budget)

    def get_flat(self, hashes: Sequence[str], targets: Sequence[_Memory]) -> list[bool]:
        """Pages to memory outside the pool, one flat tensor each."""
        return self._get(hashes, [(rows, None) for rows in self._pieces(targets)])

    def set(
        self,
        hashes: Sequence[str],
        places: Sequence[int],
        before: Sequence[str] = (),
        budget: Budget | None = None,
    ) -> list[bool]:
        """Stores pages from these places of the pool. `before` are the hashes of the prompt's pages
        before the first. After the first page that is not stored nothing is.
        """
        return self._set(hashes, [(rows, places) for rows in self._rows], before, budget)

    def set_flat(self, hashes: Sequence[str], sources: Sequence[_Memory]) -> list[bool]:
        """Stores pages from memory outside the pool, one flat tensor each."""
        return self._set(hashes, [(rows, None) for rows in self._pieces(sources)], ())

    def clear(self, budget: Budget | None = None) -> None:
        """Deletes every page of this family, of all ranks and servers. Raises when the daemon does
        not answer.
        """
        budget = budget or Budget(self._options.set_deadline)
        for layout in self._layouts:
            with suppress(kvtier.UnknownNamespace):  # nobody has opened it
                self._connection.delete_namespace(
                    layout,
                    tenant=self._options.tenant,
                    salt=self._salt,
                    deadline=budget.at_most(self._options.set_deadline),
                )
        for part in self._parts or ():
            part.namespace.reopen(deadline=budget.at_most(self._options.set_deadline))

    def pause(self) -> None:
        """Everything is a miss, and nothing is stored, until `resume`."""
        with self._switching:
            self._switches += 1
            self._is_wanted, self._parts = False, None

    def resume(self, weights_revision: str, budget: Budget | None = None) -> None:
        """Goes on with the pages of these weights. If they are others than before, the pages of
        those before are ended, of all ranks and servers: whoever still has those weights stores
        them anew. Where the daemon does not answer they stay until it does, and as long nothing is
        found under their name here.
        """
        budget = budget or Budget(self._options.set_deadline)
        if weights_revision != self._layouts[0].weights_revision:
            self.pause()
            self._leaving.leave(
                [part.left for part in self._bound]
                or [
                    Left(layout=layout, first_generation=None, generation=None)
                    for layout in self._layouts
                ],
                to_revision=weights_revision,
                deadline=budget.left,
            )
            layouts = [
                replace(layout, weights_revision=weights_revision) for layout in self._layouts
            ]
            with self._switching:
                self._layouts, self._bound = layouts, []
        with self._switching:
            # Whoever began to open before the update must not go on with what that was.
            self._switches += 1
            self._is_wanted = True
        self._open(max(budget.left, self._options.exists_deadline))

    def _asked(
        self, hashes: Sequence[str], budget: Budget | None
    ) -> tuple[Sequence[Namespace], Sequence[str], Budget, Callable[[], bool]]:
        budget = budget or Budget(self._options.exists_deadline)
        parts = self._present(budget)
        namespaces = [part.namespace for part in parts]
        return namespaces, hashes, budget, lambda: self._is_open(parts, budget)

    def _present(self, budget: Budget) -> Sequence[_Part]:
        """What a call goes on with: nothing while it is paused. Settles what is owed, and opens
        what could not be opened, once a second.
        """
        parts = self._parts
        is_due = parts is None or not self._leaving.is_settled
        if (
            is_due
            and self._is_wanted
            and time.monotonic() >= self._opens_at
            and self._opening.acquire(blocking=False)
        ):
            try:
                self._opens_at = time.monotonic() + _REOPEN_S
                self._leaving.settle(budget.at_most(self._options.exists_deadline))
                self._open(budget.at_most(self._options.exists_deadline))
            finally:
                self._opening.release()
        return self._parts or ()

    def _open(self, deadline: float) -> None:
        """Binds to the present weights, if the daemon lets it and no pages of before are there."""
        with self._switching:
            switches, layouts = self._switches, self._layouts
            if self._parts is not None or not self._is_wanted or self._leaving.owes(layouts):
                return
        try:
            opened = self._opened(layouts, deadline)
        except kvtier.KvtierError as error:
            if not self._is_refused:
                log.warning("kvtier: all pages are misses: %s (%s)", str(error), error.remedy)
            self._is_refused = True
            return
        with self._switching:
            if switches == self._switches:
                self._bound = self._parts = opened
                self._is_refused = False

    def _opened(self, layouts: Sequence[Layout], deadline: float) -> list[_Part]:
        made, budget = [], Budget(deadline)
        for layout, rows in zip(layouts, self._rows, strict=True):
            namespace = self._connection.namespace(
                layout,
                tenant=self._options.tenant,
                salt=self._salt,
                deadline=budget.at_most(deadline),
            )
            made.append(
                _Part(namespace=namespace, rows=rows, first_generation=namespace.generation)
            )
        return made

    def _get(
        self,
        hashes: Sequence[str],
        memory: Sequence[tuple[_Memory, Sequence[int] | None]],
        budget: Budget | None = None,
    ) -> list[bool]:
        budget = budget or Budget(self._options.get_deadline)
        if not (parts := self._present(budget)):
            return [False] * len(hashes)
        keys = parts[0].namespace.keys_from(hashes)

        def ask(number: int, begin: int, end: int) -> int:
            rows, places = memory[number]
            return (
                parts[number]
                .namespace.get(
                    keys[begin:end],
                    out=rows if places is not None else rows[begin:end],
                    at=None if places is None else places[begin:end],
                    deadline=budget.left,
                    codec=self._at_rest.accepted,
                )
                .prefix
            )

        count = self._moved(parts, len(keys), budget, ask)
        self.got.add(
            count,
            count * sum(self._part_bytes),
            budget.spent,
            asked=len(keys),
            is_late=budget.left <= 0,
        )
        return [True] * count + [False] * (len(keys) - count)

    def _set(
        self,
        hashes: Sequence[str],
        memory: Sequence[tuple[_Memory, Sequence[int] | None]],
        before: Sequence[str],
        budget: Budget | None = None,
    ) -> list[bool]:
        budget = budget or Budget(self._options.set_deadline)
        if not (parts := self._present(budget)):
            return [False] * len(hashes)
        keys = parts[0].namespace.keys_from(hashes)
        news = [0] * len(parts)
        last_before = next(iter(parts[0].namespace.keys_from(before[-1:])), None)

        def ask(number: int, begin: int, end: int) -> int:
            rows, places = memory[number]
            stored = parts[number].namespace.put(
                keys[begin:end],
                rows if places is not None else rows[begin:end],
                at=None if places is None else places[begin:end],
                parent=keys[begin - 1] if begin else last_before,
                depth=len(before) + begin,
                deadline=budget.left,
                codec=self._at_rest.codec,
            )
            news[number] += stored.counts().get(kvtier.PutCode.STORED, 0)
            return stored.prefix

        count = self._moved(parts, len(keys), budget, ask)
        self.put.add(
            count,
            sum(new * size for new, size in zip(news, self._part_bytes, strict=True)),
            budget.spent,
            asked=len(keys),
            already=count - min(count, max(news)),
            is_late=budget.left <= 0,
        )
        return [True] * count + [False] * (len(keys) - count)

    def _moved(
        self,
        parts: Sequence[_Part],
        total: int,
        budget: Budget,
        ask: Callable[[int, int, int], int],
    ) -> int:
        """See runs.in_runs."""
        run = Run(parts=len(parts), page_bytes=self.page_bytes, total=total)
        return in_runs(run, budget, ask, lambda: self._is_open(parts, budget))

    def _pieces(self, pages: Sequence[_Memory]) -> list[list[_Memory]]:
        """The objects of flat pages: for each part a list with its piece of every page."""
        lengths = [
            layout.raw_bytes // rows.element_size()
            for layout, rows in zip(self._layouts, self._rows, strict=True)
        ]
        return cut(pages, lengths)

    def _is_open(self, parts: Sequence[_Part], budget: Budget) -> bool:
        """Whether asking `parts` makes sense. After somebody bumped or deleted a namespace, or when
        no daemon was there to open it, binds to the present generation.

        The family names the weights: if the daemon has others for it now, opening it is refused,
        and everything stays a miss.
        """
        if not parts or parts is not self._parts:
            return False
        if not self._is_refused and all(_is_bound(part.namespace) for part in parts):
            return True
        with self._reopening:
            if time.monotonic() < self._reopens_at or budget.left <= 0:
                return not self._is_refused
            self._reopens_at = time.monotonic() + _REOPEN_S
            try:
                for part in parts:
                    part.namespace.reopen(deadline=budget.at_most(self._options.exists_deadline))
            except kvtier.KvtierError as error:
                # Also when the daemon only did not answer: a namespace that is released and not
                # bound would be opened by the next call, which raises if it is refused then.
                if not self._is_refused:
                    log.warning("kvtier: all pages are misses: %s (%s)", str(error), error.remedy)
                self._is_refused = True
            else:
                self._is_refused = False
        return not self._is_refused


def _is_bound(namespace: Namespace) -> bool:
    """Where it is not a call would open it, and raise if that is refused."""
    return namespace.generation is not None and not namespace.is_stale
