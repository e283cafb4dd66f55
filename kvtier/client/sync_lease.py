"""A lease for code without asyncio: `with ns.lease(keys) as held`.

Usable from any thread; see `lease` for what it promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from kvtier.client.lease import AsyncLease
from kvtier.client.local_lease import ViewSource
from kvtier.core.page import GetCode
from kvtier.transfer.planes.deadline import Deadline

if TYPE_CHECKING:
    import torch

    from kvtier.client.sync import Connection

__all__ = ["Lease"]


class Lease:
    """Made by `ns.lease(keys)`, held inside `with`. A key that is not HIT is not held."""

    def __init__(self, connection: Connection, lease: AsyncLease) -> None:
        self._connection = connection
        self._async = lease

    def __enter__(self) -> Lease:
        self._connection._run(self._async.take(deadline=self._within()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def reasons(self) -> list[GetCode]:
        """The outcome of each key: HIT is held."""
        return self._async.reasons

    @property
    def prefix(self) -> int:
        """How many keys from the first on are held."""
        return self._async.prefix

    @property
    def ttl(self) -> float:
        """Seconds that the daemon grants from taking or renewing on; 0 if nothing is held."""
        return self._async.ttl

    @property
    def sources(self) -> list[ViewSource]:
        """Where the view of each key comes from: IN_PLACE is no copy, all others say why not."""
        return self._async.sources

    @property
    def in_place(self) -> list[bool]:
        """Of which keys the view is the daemon's own memory, which counts only after `verify`."""
        return self._async.in_place

    def pages(self) -> Sequence[bytearray | None]:
        """The raw bytes of each page, a verified copy; None where it is not there."""
        return self._connection._run(self._async.pages(deadline=self._within()))

    def views(self, *, lossy_ok: bool = False) -> list[memoryview | None]:
        """The raw bytes of each page that is held, read-only, in place where `in_place` says so;
        what is in place counts only after `verify`. See AsyncLease.views.
        """
        return self._connection._run(self._async.views(lossy_ok=lossy_ok, deadline=self._within()))

    def tensors(self, *, lossy_ok: bool = False) -> list[dict[str, torch.Tensor] | None]:
        """Each page that is held as its segments by name, over the memory of `views`; never write
        to them. What is in place counts only after `verify`. See AsyncLease.tensors.
        """
        return self._connection._run(
            self._async.tensors(lossy_ok=lossy_ok, deadline=self._within())
        )

    def verify(self) -> list[GetCode]:
        """What the views were worth until now, one code a key. To be asked when the engine's own
        copy out of them is done, and before `release`. See AsyncLease.verify.
        """
        return self._connection._run(self._async.verify(deadline=self._within()))

    def renew(self, ttl: float = 0.0) -> None:
        """Moves the deadline to `ttl` seconds from now. Raises LeaseExpired."""
        self._connection._run(self._async.renew(ttl, deadline=self._within()))

    def release(self) -> None:
        """Ends the lease. Ending it twice, or after the daemon ended it, is no error."""
        self._connection._run(self._async.release(deadline=self._within()))

    def _within(self) -> Deadline:
        return self._async.within()
