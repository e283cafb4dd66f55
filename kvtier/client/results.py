"""What a batch came to: one outcome a key, never one answer for many.

A result is a sequence with one item a key, in request order. It has no truth value on purpose: `if
result:` cannot mean anything for a batch in which some pages came and some did not.

Immutable (but for the bytes of `GetResult.pages`): usable from any thread.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NoReturn, TypeVar, overload

from kvtier.core.page import Codec, DeleteCode, Durability, GetCode, PageRef, PutCode, Tier
from kvtier.errors import (
    Busy,
    CorruptPage,
    DaemonUnavailable,
    DeadlineExceeded,
    KvtierError,
    NonFinite,
    NotDurable,
    StaleGeneration,
)

__all__ = [
    "DeleteResult",
    "GetColumns",
    "GetItem",
    "GetResult",
    "LookupItem",
    "LookupResult",
    "MoveResult",
    "PutItem",
    "PutResult",
    "leading_run",
]

I = TypeVar("I")  # noqa: E741
C = TypeVar("C", bound=IntEnum)

_STORED = bytes((PutCode.STORED, PutCode.EXISTS))
_REFUSED: dict[PutCode, tuple[type[KvtierError], str]] = {
    PutCode.STALE_GENERATION: (StaleGeneration, "open the namespace again with ns.reopen()"),
    PutCode.NONFINITE: (
        NonFinite,
        "find where the model made infinities; do not cache these pages",
    ),
    PutCode.QUOTA: (Busy, "raise the tenant's quota, or put less"),
    PutCode.BUSY: (Busy, "put again later, or give the daemon more memory"),
    PutCode.REFUSED: (
        CorruptPage,
        "the bytes changed on their way: do not write to pages in a put",
    ),
    PutCode.TIMEOUT: (DeadlineExceeded, "put again; raise `deadline` if this happens often"),
    PutCode.UNAVAILABLE: (DaemonUnavailable, "see that the daemon runs; put again later"),
}


def leading_run(codes: bytes, code: int) -> int:
    """How many items from the first on are `code`."""
    return len(codes) - len(codes.lstrip(bytes((code,))))


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupItem:
    reason: GetCode
    tier: Tier | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetItem:
    """`tier`, `codec` and `ref` say where the copy came from; None unless `reason` is HIT."""

    reason: GetCode
    tier: Tier | None
    codec: Codec | None
    lossy: bool
    ref: PageRef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PutItem:
    """`ref` is the page's place in host memory; None unless it was stored by this call. `durable`
    says that the daemon has it on NVMe.
    """

    reason: PutCode
    ref: PageRef | None
    durable: bool

    @property
    def is_stored(self) -> bool:
        """The page is in the cache now, whoever put it there."""
        return self.reason.is_stored


class _Batch(Sequence[I], Generic[I, C]):
    _kind: type[C]

    def __init__(self, codes: bytes) -> None:
        self._codes = codes

    @property
    def reasons(self) -> list[C]:
        """The outcome of each key."""
        return [self._kind(code) for code in self._codes]

    def counts(self) -> dict[C, int]:
        """How many keys had each outcome."""
        return {self._kind(code): count for code, count in sorted(Counter(self._codes).items())}

    def __len__(self) -> int:
        return len(self._codes)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} has one outcome a key and no truth value: "
            "look at its items, or at .prefix, .hits, .stored"
        )

    @overload
    def __getitem__(self, index: int) -> I: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[I]: ...
    def __getitem__(self, index: int | slice) -> I | Sequence[I]:
        places = range(len(self._codes))[index]
        if isinstance(places, range):
            return [self._item(place) for place in places]
        return self._item(places)

    @abstractmethod
    def _item(self, index: int) -> I: ...

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {code.name}" for code, count in self.counts().items())
        return f"<{type(self).__name__}: {counts or 'empty'}>"


class _Found(_Batch[I, GetCode]):
    _kind = GetCode

    def __init__(self, codes: bytes, tiers: bytes, page_tokens: int) -> None:
        super().__init__(codes)
        self._tiers = tiers
        self._page_tokens = page_tokens

    @property
    def prefix(self) -> int:
        """Leading hits, in pages: what an engine can use of a conversation."""
        return leading_run(self._codes, GetCode.HIT)

    @property
    def prefix_tokens(self) -> int:
        """Leading hits, in tokens. An engine still computes the last token of a prompt itself."""
        return self.prefix * self._page_tokens

    @property
    def hits(self) -> int:
        """All hits, wherever they are in the batch."""
        return self._codes.count(GetCode.HIT)

    def _tier(self, index: int) -> Tier | None:
        return Tier(self._tiers[index]) if self._tiers[index] else None


class LookupResult(_Found[LookupItem]):
    """Advice: a page can leave before the get. Only a get's own result counts."""

    def _item(self, index: int) -> LookupItem:
        return LookupItem(reason=GetCode(self._codes[index]), tier=self._tier(index))


@dataclass(frozen=True, slots=True, kw_only=True)
class GetColumns:
    """One entry a key: byte strings for the codes, lists for the numbers."""

    codes: bytes
    tiers: bytes
    codecs: bytes
    lossy: bytes
    boot_ids: Sequence[int]
    slots: Sequence[int]
    generations: Sequence[int]


class GetResult(_Found[GetItem]):
    """What came of each key. Only a HIT's bytes are there, whole and verified.

    `pages` holds the bytes when the get had no `out`: a bytearray for a hit, None for anything
    else. With `out` it is empty, and the places in `out` of pages that are no hits may hold
    anything.
    """

    def __init__(
        self, columns: GetColumns, *, page_tokens: int, pages: Sequence[bytearray | None] = ()
    ) -> None:
        super().__init__(columns.codes, columns.tiers, page_tokens)
        self._columns = columns
        self.pages = pages

    def _item(self, index: int) -> GetItem:
        columns = self._columns
        reason = GetCode(columns.codes[index])
        if reason is not GetCode.HIT:
            return GetItem(reason=reason, tier=None, codec=None, lossy=False, ref=None)
        tier = Tier(columns.tiers[index])
        return GetItem(
            reason=reason,
            tier=tier,
            codec=Codec(columns.codecs[index]),
            lossy=bool(columns.lossy[index]),
            ref=PageRef(
                columns.boot_ids[index], tier, columns.slots[index], columns.generations[index]
            ),
        )


class PutResult(_Batch[PutItem, PutCode]):
    _kind = PutCode

    def __init__(
        self,
        codes: bytes,
        refs: Sequence[PageRef | None],
        *,
        reached: bytes = b"",
        wanted: Durability = Durability.HOST,
    ) -> None:
        """`reached` has a Durability number a page, 0 where nobody knows; empty knows of none."""
        super().__init__(codes)
        self._refs = refs
        self._reached = reached or bytes(len(codes))
        self._wanted = wanted

    @property
    def prefix(self) -> int:
        """How many pages from the first on are in the cache now."""
        return len(self._codes) - len(self._codes.lstrip(_STORED))

    @property
    def stored(self) -> int:
        """How many of the pages are in the cache now, put there by this call or before."""
        return sum(map(_is_stored, self._codes))

    @property
    def durable(self) -> int:
        """How many of the pages are on NVMe now, and survive the daemon."""
        return sum(map(self._is_durable, range(len(self._codes))))

    def raise_for_refused(self) -> None:
        """Raises the error of the first page that is not in the cache; nothing when all are.

        With durable="nvme" it raises NotDurable when all are in the cache and some are not durable.
        """
        for index, code in enumerate(self._codes):
            if not _is_stored(code):
                kind, remedy = _REFUSED[PutCode(code)]
                missing = len(self._codes) - self.stored
                raise kind(
                    f"page {index} is {PutCode(code).name}; "
                    f"{missing} of {len(self._codes)} pages are not in the cache",
                    remedy=remedy,
                )

        if self._wanted is Durability.NVME:
            self._raise_for_volatile()

    def _raise_for_volatile(self) -> None:
        for index in range(len(self._codes)):
            if not self._is_durable(index):
                raise NotDurable(
                    f"page {index} is {PutCode(self._codes[index]).name} in host memory and not "
                    f"durable; {len(self._codes) - self.durable} of {len(self._codes)} pages are "
                    "not on NVMe",
                    remedy="see the daemon's NVMe tier and the warnings in `kvtier status` (a page "
                    "may be longer than nvme.bytes allows for); put again later, or go on without",
                )

    def _is_durable(self, index: int) -> bool:
        return self._reached[index] == Durability.NVME and _is_stored(self._codes[index])

    def _item(self, index: int) -> PutItem:
        return PutItem(
            reason=PutCode(self._codes[index]),
            ref=self._refs[index],
            durable=self._is_durable(index),
        )


class DeleteResult(_Batch[DeleteCode, DeleteCode]):
    """One DeleteCode a key."""

    _kind = DeleteCode

    @property
    def deleted(self) -> int:
        return self._codes.count(DeleteCode.DELETED)

    def _item(self, index: int) -> DeleteCode:
        return DeleteCode(self._codes[index])


class MoveResult(_Batch[GetCode, GetCode]):
    """One GetCode a key: HIT is in the wanted tier, or on its way there."""

    _kind = GetCode

    @property
    def prefix(self) -> int:
        """How many pages from the first on are in the wanted tier, or on their way there."""
        return leading_run(self._codes, GetCode.HIT)

    @property
    def hits(self) -> int:
        """How many of the pages are in the wanted tier, or on their way there."""
        return self._codes.count(GetCode.HIT)

    def _item(self, index: int) -> GetCode:
        return GetCode(self._codes[index])


def _is_stored(code: int) -> bool:
    return code in _STORED
