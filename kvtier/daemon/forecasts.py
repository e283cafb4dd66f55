"""The policy of host memory by its name, and what a policy that learns keeps from boot to boot.

    version u32le | entries u32le | for each: tier u8, record bytes u64le, length u32le, learned

The file `forecasts` of the daemon directory (a sealed file) is written as often as checkpoints are,
and at a stop. It holds models and neither pages nor requests: some 82 KB for each size class. A
start goes on without it: a file that is damaged, of another version, or not what this policy can
have learned is left out, and said to be.

`load` and `host_policy` before the daemon serves; `save` on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from pathlib import Path
from typing import Final

from kvtier.config import HostPolicyName
from kvtier.core.page import TIERS
from kvtier.core.policy import POLICIES
from kvtier.core.policy.forecasting import FORECASTING
from kvtier.core.policy.lru import Clock
from kvtier.core.queues import Learned
from kvtier.core.store import MakePolicy, Store
from kvtier.core.table import CopyTable
from kvtier.daemon.state import FORECASTS
from kvtier.errors import DirectoryError, MissingExtra
from kvtier.packing.optional_code import load_optional
from kvtier.tiers.sealed_file import read_sealed, write_sealed

__all__ = ["ForecastFile", "host_policy", "pack_learned", "unpack_learned"]

log = logging.getLogger(__name__)

_KIND: Final = b"forecast"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<II")
_ENTRY: Final = struct.Struct("<BQI")


def host_policy(name: HostPolicyName) -> MakePolicy:
    """What makes the queues of host memory; one that learns is compiled when this returns.

    Raises MissingExtra where that cannot be.
    """
    if name.value not in FORECASTING:
        return POLICIES[name.value]
    try:
        load_optional("kvtier.packing.jit_numba")
        warm = load_optional("kvtier.core.policy.gittins.warm")
    except ImportError as error:
        raise MissingExtra(
            f'host.policy = "{name.value}" needs numba, which cannot be used: {error}',
            remedy="pip install 'kvtier[fast]' and leave NUMBA_DISABLE_JIT unset, or set "
            'host.policy = "lru".',
        ) from error
    warm.warm_up()
    return FORECASTING[name.value]


def pack_learned(learned: Learned) -> bytes:
    parts = [_HEAD.pack(_VERSION, len(learned))]
    for (tier, record_bytes), model in learned.items():
        parts += [_ENTRY.pack(tier, record_bytes, len(model)), model]
    return b"".join(parts)


def unpack_learned(payload: bytes) -> Learned:
    """Raises ValueError for what `pack_learned` cannot have made, and for another version."""
    try:
        version, count = _HEAD.unpack_from(payload)
        if version != _VERSION:
            raise ValueError(f"version {version}, this daemon knows version {_VERSION}")
        found: Learned = {}
        at = _HEAD.size
        for _ in range(count):
            tier, record_bytes, length = _ENTRY.unpack_from(payload, at)
            at += _ENTRY.size
            found[TIERS[tier], record_bytes] = payload[at : at + length]
            at += length
    except (struct.error, KeyError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
    if at != len(payload):
        raise ValueError(f"{len(payload)} bytes where {at} belong")
    return found


class ForecastFile:
    """Of one daemon directory and store."""

    def __init__(self, directory: Path, store: Store, policy: HostPolicyName) -> None:
        self._path = directory / FORECASTS
        self._store = store
        self._policy = policy
        self._saved = b""
        self._saving = asyncio.Lock()

    @property
    def is_on(self) -> bool:
        """The policy learns."""
        return self._policy.value in FORECASTING

    def load(self) -> str:
        """Takes up what an earlier boot has learned; "", or why that is not so. Tells the time."""
        self._store.forecasts.tell_time(time.monotonic())
        if not self.is_on:
            return ""
        try:
            payload = read_sealed(self._path, _KIND)
            if payload is None:
                return ""
            learned = unpack_learned(payload)
            for model in learned.values():
                FORECASTING[self._policy.value](CopyTable(1), Clock()).learn_from(model)
        except (DirectoryError, ValueError) as error:
            return f"host.policy learns anew, as {self._path} cannot be used: {error}"
        self._store.forecasts.put_back(learned)
        self._saved = payload
        return ""

    async def save(self) -> None:
        """Writes what was learned, if it is something else than before. Raises DirectoryError."""
        if not self.is_on:
            return
        async with self._saving:
            payload = pack_learned(self._store.forecasts.take())
            if payload != self._saved:
                await asyncio.to_thread(write_sealed, self._path, _KIND, payload)
                self._saved = payload
