"""The device pools that engines tell of: what they are, how full, and who has them.

The daemon keeps account and decides nothing by it. A pool is here from its first report until its
engine takes it back or its session ends. Bounded: so many pools a session.

Changed on the event loop's thread alone; `told` may be read by any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvtier.errors import LimitExceeded
from kvtier.transfer.planes.values import PoolReport

__all__ = ["DevicePools", "PoolKey", "Told"]

log = logging.getLogger(__name__)

#: Session and name.
PoolKey: TypeAlias = tuple[int, str]

_POOLS_PER_SESSION_MAX: Final = 16
_TEXT_BYTES_MAX: Final = 256
_FINGERPRINT_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The last that a session said of a pool, and when in monotonic seconds."""

    session_id: int
    client_name: str
    at: float
    pool: PoolReport


class DevicePools:
    def __init__(self) -> None:
        self._told: Mapping[PoolKey, Told] = {}
        #: Rises with every change, for watchers.
        self.version = 0

    @property
    def told(self) -> Mapping[PoolKey, Told]:
        """All pools as they are now; never changed afterwards."""
        return self._told

    def report(self, session_id: int, client_name: str, pool: PoolReport) -> None:
        """Raises LimitExceeded for counts that do not add up, and for too much of anything."""
        _check(pool)
        key = session_id, pool.name
        is_new = key not in self._told
        mine = sum(session == session_id for session, _ in self._told)
        if is_new and mine >= _POOLS_PER_SESSION_MAX:
            raise LimitExceeded(
                f"the session has told of {_POOLS_PER_SESSION_MAX} pools, the most",
                remedy="Take back pools that are gone, or use one for several models.",
            )
        told = Told(session_id=session_id, client_name=client_name, at=time.monotonic(), pool=pool)
        self._change({**self._told, key: told})
        if is_new:
            fields = {"client": client_name, "pool": pool.name, "device": pool.device}
            log.info("pool.told", extra={**fields, "session": session_id, "pages": pool.pages})

    def take_back(self, session_id: int, name: str) -> None:
        """One that is not known is no error."""
        self._drop({(session_id, name)})

    def end_session(self, session_id: int) -> None:
        self._drop({key for key in self._told if key[0] == session_id})

    def pages(self) -> dict[tuple[str, ...], float]:
        """Pages by (engine, pool, state), engines of one name together. Any thread."""
        counts: dict[tuple[str, ...], float] = {}
        for told in self._told.values():
            pool = told.pool
            free = pool.pages - pool.held - pool.draining
            states = {"free": free, "held": pool.held, "draining": pool.draining}
            for state, count in (states | {"pinned": pool.pinned}).items():
                key = told.client_name, pool.name, state
                counts[key] = counts.get(key, 0) + count
        return counts

    def capacity_bytes(self) -> dict[tuple[str, ...], float]:
        """Bytes by (engine, pool), as `pages`. Any thread."""
        found: dict[tuple[str, ...], float] = {}
        for told in self._told.values():
            key = told.client_name, told.pool.name
            found[key] = found.get(key, 0) + told.pool.pages * told.pool.page_bytes
        return found

    def _drop(self, keys: set[PoolKey]) -> None:
        gone = keys & self._told.keys()
        if not gone:
            return
        self._change({key: told for key, told in self._told.items() if key not in gone})
        for session_id, name in sorted(gone):
            log.info("pool.gone", extra={"session": session_id, "pool": name})

    def _change(self, told: Mapping[PoolKey, Told]) -> None:
        self._told = told
        self.version += 1


def _check(pool: PoolReport) -> None:
    sizes = [len(text.encode()) for text in (pool.name, pool.device)]
    if not pool.name or max(sizes) > _TEXT_BYTES_MAX:
        raise LimitExceeded(
            f"a pool with a name of {sizes[0]} and a device of {sizes[1]} bytes",
            remedy=f"Name both, in up to {_TEXT_BYTES_MAX} bytes.",
        )
    if len(pool.fingerprint) not in (0, _FINGERPRINT_BYTES):
        raise LimitExceeded(
            f"fingerprint has {len(pool.fingerprint)} bytes",
            remedy=f"Send the {_FINGERPRINT_BYTES} bytes of a family, or none.",
        )
    if pool.held + pool.draining > pool.pages or pool.pinned > pool.held + pool.draining:
        raise LimitExceeded(
            f"{pool.held} pages held and {pool.draining} draining, {pool.pinned} of them pinned, "
            f"in a pool of {pool.pages}",
            remedy="Count all of them at one moment.",
        )
