"""A lease for code without asyncio: `with ns.lease(keys) as held`.

Usable from any thread; see `lease` for what it promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from kvtier.client.lease import AsyncLease
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

    def pages(self) -> Sequence[bytearray | None]:
        """The raw bytes of each page (a copy over grpc), None where it is not held."""
        return self._connection._run(self._async.pages(deadline=self._within()))

    def tensors(self) -> list[dict[str, torch.Tensor] | None]:
        """Each page as its segments by name; see AsyncLease.tensors."""
        return self._connection._run(self._async.tensors(deadline=self._within()))

    def renew(self, ttl: float = 0.0) -> None:
        """Moves the deadline to `ttl` seconds from now. Raises LeaseExpired."""
        self._connection._run(self._async.renew(ttl, deadline=self._within()))

    def release(self) -> None:
        """Ends the lease. Ending it twice, or after the daemon ended it, is no error."""
        self._connection._run(self._async.release(deadline=self._within()))

    def _within(self) -> Deadline:
        return self._async.within()
