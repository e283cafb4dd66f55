"""`kv.quarantine`: copies that failed their checks, kept by the daemon to be looked at.

They are never served. They end with the daemon, or when their slots are needed. Every call raises
when the daemon does not answer.

AsyncQuarantine belongs to the event loop of its connection; Quarantine may be used from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.client.batches import keys_per_call
from kvtier.client.link import Link, Within
from kvtier.core.page import PageRef
from kvtier.transfer.planes.values import QuarantinedPage

if TYPE_CHECKING:
    from kvtier.client.sync import Connection

__all__ = ["AsyncQuarantine", "Quarantine"]


class AsyncQuarantine:
    """Made by a connection."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def list(self, *, deadline: Within = None) -> tuple[QuarantinedPage, ...]:
        """What there is, oldest first. Raises DaemonUnavailable, DeadlineExceeded."""
        within = self._link.deadline(deadline)
        self._link.check_usable()
        with self._link.watched():
            return await self._link.plane.list_quarantine(within)

    async def read(self, ref: PageRef, *, deadline: Within = None) -> bytes:
        """The record of one of them as it lies: 4 KiB of header block, then the payload.

        Raises UnknownHandle when there is no such copy, or its slot was needed meanwhile.
        """
        within = self._link.deadline(deadline)
        self._link.check_usable()
        with self._link.watched():
            return await self._link.plane.read_quarantine(ref, within)

    async def clear(self, refs: Sequence[PageRef] | None = None, *, deadline: Within = None) -> int:
        """Frees the slots of these copies (none given: of all); how many it freed."""
        within = self._link.deadline(deadline)
        self._link.check_usable()
        # On the wire no refs mean all of them; an empty sequence means none.
        if refs is not None and not len(refs):
            return 0
        plane = self._link.plane
        with self._link.watched():
            if refs is None:
                return await plane.clear_quarantine((), within)
            step = keys_per_call(await plane.capabilities(within))
            return sum(
                [
                    await plane.clear_quarantine(refs[at : at + step], within)
                    for at in range(0, len(refs), step)
                ]
            )


class Quarantine:
    """Made by a connection. Every method is that of AsyncQuarantine."""

    def __init__(self, connection: Connection, opened: AsyncQuarantine) -> None:
        self._connection = connection
        self._async = opened

    def list(self, *, deadline: float | None = None) -> tuple[QuarantinedPage, ...]:
        """What there is, oldest first."""
        within = self._connection._within(deadline)
        return self._connection._run(self._async.list(deadline=within))

    def read(self, ref: PageRef, *, deadline: float | None = None) -> bytes:
        """The record of one of them as it lies; see AsyncQuarantine.read."""
        within = self._connection._within(deadline)
        return self._connection._run(self._async.read(ref, deadline=within))

    def clear(self, refs: Sequence[PageRef] | None = None, *, deadline: float | None = None) -> int:
        """Frees the slots of these copies (none given: of all); how many it freed."""
        within = self._connection._within(deadline)
        return self._connection._run(self._async.clear(refs, deadline=within))
