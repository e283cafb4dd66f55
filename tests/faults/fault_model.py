"""What a client may find after crashes: a book of everything that was asked for and answered, and a
seeded stream of calls that keeps it.

A page that was answered as durable stays until it is deleted or bumped; one that was answered as
deleted or bumped never comes back; of a call that the crash cut off either outcome is right, but
for all of the future the same one. A page put again after it was deleted has another version, so
that one that comes back from the dead is told from the living. One thread.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from fault_rig import Pages, disk_usage, leftovers, segments, tier_of

import kvtier
from kvtier.core.page import DeleteCode, GetCode, PutCode, Tier
from kvtier.errors import DaemonUnavailable, DeadlineExceeded, KvtierError

#: Instead of a version: the page may be a miss.
MISS = 0
#: Outcomes that say nothing about the page.
NO_ANSWER = {GetCode.UNAVAILABLE, GetCode.TIMEOUT, GetCode.BUSY}


class Book:
    """`allowed`: for each page by number the versions that may be found, MISS among them."""

    def __init__(self, pages: Pages, count: int) -> None:
        self.pages = pages
        self.allowed = {number: {MISS} for number in range(count)}
        self.version = itertools.count(1)
        self.generation = 0

    @property
    def numbers(self) -> list[int]:
        return list(self.allowed)

    @property
    def must_be_there(self) -> set[int]:
        return {number for number, versions in self.allowed.items() if MISS not in versions}

    def found(self, number: int, reason: GetCode, page: bytes | None) -> None:
        """Takes in the outcome of a get; fails if it cannot be."""
        allowed = self.allowed[number]
        if reason is GetCode.HIT:
            right = [v for v in allowed - {MISS} if not self.pages.wrong(number, page, v)]
            if not right:
                wrong = self.pages.wrong(number, page, max(allowed))
                pytest.fail(f"page {number} of {self.pages.name}: {wrong}, allowed {allowed}")
            self.allowed[number] = {right[0]} | allowed & {MISS}
        elif reason not in NO_ANSWER:
            assert MISS in allowed, f"page {number} of {self.pages.name} is {reason!r}: {allowed}"
            # What is torn is found out by its reader, and is a miss from then on.
            assert reason in (GetCode.MISS, GetCode.CORRUPT), reason
            self.allowed[number] = {MISS}


class Workload:
    """Calls in an order that `seed` gives, against one daemon after the other."""

    def __init__(self, seed: int, stable: Book, bumped: Book) -> None:
        self.rng = random.Random(seed)
        self.stable = stable
        self.bumped = bumped
        self._kv = None
        self._spaces: dict[str, kvtier.client.Namespace] = {}

    def attach(self, kv) -> None:
        """The daemon is another one, or the same after a restart. Raises KvtierError."""
        self._kv = kv
        for book in (self.stable, self.bumped):
            opened = kv.namespace(book.pages.layout)
            self._spaces[book.pages.name] = opened
            assert opened.generation is None or opened.generation >= book.generation

    def get_all(self) -> None:
        for book in (self.stable, self.bumped):
            self.get(book, book.numbers)

    def steps_until(self, is_over: Callable[[], bool], *, steps_max: int = 1_000_000) -> None:
        """Goes on until then; a daemon that has died is no error."""
        actions: list[tuple[Callable[[Book], None], int]] = [
            (self.put_durable, 6),
            (self.put, 3),
            (self.get_some, 3),
            (self.delete, 2),
            (self.flush, 1),
            (self.demote, 1),
        ]
        works, weights = zip(*actions, strict=True)
        for _ in range(steps_max):
            if is_over():
                return
            try:
                if self.rng.random() < 0.1:
                    self.bump()
                else:
                    (work,) = self.rng.choices(works, weights)
                    work(self.rng.choice((self.stable, self.stable, self.bumped)))
            except (DaemonUnavailable, DeadlineExceeded):
                continue
            except KvtierError as error:
                pytest.fail(f"{type(error).__name__}: {error}")
        pytest.fail(f"it did not come in {steps_max} steps")

    # -- calls -----------------------------------------------------------------------------------

    def put_durable(self, book: Book) -> None:
        self._put(book, self._some(book, 4), durable="nvme")

    def put(self, book: Book) -> None:
        self._put(book, self._some(book, 3), durable="host")

    def get_some(self, book: Book) -> None:
        self.get(book, self._some(book, 8))

    def get(self, book: Book, numbers: list[int]) -> None:
        got = self._ns(book).get(book.pages.keys(numbers))
        for number, item, page in zip(numbers, got, got.pages, strict=True):
            book.found(number, item.reason, page)

    def delete(self, book: Book) -> None:
        numbers = self._some(book, 2)
        for number in numbers:
            book.allowed[number] |= {MISS}
        codes = self._ns(book).delete(book.pages.keys(numbers))
        assert all(code in (DeleteCode.DELETED, DeleteCode.ABSENT) for code in codes), codes
        for number in numbers:
            book.allowed[number] = {MISS}

    def bump(self) -> None:
        book, ns = self.bumped, self._ns(self.bumped)
        for versions in book.allowed.values():
            versions.add(MISS)
        book.generation = ns.bump()
        book.allowed = {number: {MISS} for number in book.numbers}
        ns.reopen()

    def flush(self, _book: Book) -> None:
        self._kv.flush()

    def demote(self, book: Book) -> None:
        self._ns(book).demote(book.pages.keys(self._some(book, 3)))

    def _put(self, book: Book, numbers: list[int], *, durable: str) -> None:
        versions = {number: next(book.version) for number in numbers}
        before = {number: set(book.allowed[number]) for number in numbers}
        for number, version in versions.items():
            book.allowed[number].add(version)
        pages = [book.pages.page(number, versions[number]) for number in numbers]
        put = self._ns(book).put(book.pages.keys(numbers), pages, durable=durable, chain=False)
        for number, item in zip(numbers, put, strict=True):
            if item.reason is PutCode.STORED:
                book.allowed[number] = {versions[number], MISS}
            elif item.reason is PutCode.EXISTS:
                book.allowed[number] = before[number]
            if item.durable:
                book.allowed[number] -= {MISS}

    def _some(self, book: Book, most: int) -> list[int]:
        return self.rng.sample(book.numbers, self.rng.randint(1, most))

    def _ns(self, book: Book):
        return self._spaces[book.pages.name]


def check_account(daemon, kv, books: list[Book], devices: list) -> None:
    """Just after a start: files, ledger and what can be found say the same, and nothing is left."""
    assert not leftovers(daemon.directory, *devices)
    nvme = tier_of(kv)
    assert (nvme.pages_filling, nvme.pages_retiring, nvme.pages_quarantined) == (0, 0, 0)
    assert nvme.ready_bytes == sum(
        path.stat().st_size - 4096 for device in devices for path in segments(device)
    )
    by_path = {status.path: status for status in kv.status().devices}
    for device in devices:
        assert by_path[str(device)].disk_bytes == disk_usage(device)
        assert by_path[str(device)].is_online
    pages = bytes_used = 0
    for book in books:
        found = kv.namespace(book.pages.layout).lookup(book.pages.keys(book.numbers))
        hits = [item for item in found if item.reason is GetCode.HIT]
        assert all(item.tier is Tier.NVME for item in hits)
        pages += len(hits)
        bytes_used += len(hits) * book.pages.record_bytes
    assert (nvme.pages_sealed, nvme.used_bytes) == (pages, bytes_used)
