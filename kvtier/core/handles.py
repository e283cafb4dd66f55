"""Handles carry the state: a slot being filled, a page being read. Leaving a block without `seal`
gives it back.

    with store.reserve(...) as filling:     # unless it is a PutCode
        ... write the bytes of filling.ref ...
        code = filling.seal()

A handle belongs to the thread that made it; its methods take the store's lock themselves.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from kvtier.core.page import Codec, PageMeta, PageRef, PutCode

if TYPE_CHECKING:
    from kvtier.core.store import Store

__all__ = ["Filling", "Reading"]


class Filling:
    """A reserved slot that nobody else may read or write. Ends with exactly one of its methods."""

    __slots__ = ("_store", "meta", "namespace", "open", "ref", "row")

    def __init__(
        self, store: Store, *, row: int, ref: PageRef, namespace: int, meta: PageMeta
    ) -> None:
        self._store = store
        self.row = row
        self.ref = ref
        self.namespace = namespace
        self.meta = meta
        self.open = True

    def seal(self) -> PutCode:
        """The bytes are whole and verified: STORED, or why this page does not become findable.

        EXISTS when another put of the key was sealed first, STALE_GENERATION when the namespace was
        bumped or deleted, or the slot taken away, since `reserve`. Anything but STORED has given
        the slot back.
        """
        self.open = False
        return self._store._seal(self)

    def abandon(self) -> None:
        """Gives the slot back. Its writer must have stopped."""
        if self.open:
            self.open = False
            self._store._abandon(self)

    def orphan(self) -> None:
        """The writer is gone but may still write: the slot is quarantined."""
        if self.open:
            self.open = False
            self._store._orphan(self)

    def __enter__(self) -> Filling:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()


class Reading:
    """A page whose slot cannot be reused until `release`."""

    __slots__ = ("_store", "codec", "length", "lossy", "open", "ref", "row")

    def __init__(
        self, store: Store, *, row: int, ref: PageRef, length: int, codec: Codec, lossy: bool
    ) -> None:
        self._store = store
        self.row = row
        self.ref = ref
        self.length = length
        self.codec = codec
        self.lossy = lossy
        self.open = True

    def again(self) -> Reading:
        """A second Reading of the same copy, with an end of its own."""
        assert self.open
        return self._store._read_again(self)

    def release(self) -> None:
        if self.open:
            self.open = False
            self._store._release(self.row)

    def __enter__(self) -> Reading:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
