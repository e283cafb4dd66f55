"""Which pages each session has put since its last Flush.

Keys alone, 32 bytes a page; those that are durable by themselves meanwhile are dropped when they
become many. A page that was put more than once is one page. Event loop's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from kvtier.core.page import KEY_BYTES, Tier
from kvtier.core.store import Store
from kvtier.daemon.tiering import Keys, Scope

__all__ = ["Unflushed"]

#: So many keys of one place are looked through for durable ones before more are taken.
_KEYS_MAX = 65_536


class Unflushed:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys: dict[int, dict[Scope, bytearray]] = {}
        self._lost: Counter[int] = Counter()

    def stored(self, session: int, scope: Scope, keys: Iterable[bytes]) -> None:
        """A put of this session has stored pages."""
        held = self._keys.setdefault(session, {}).setdefault(scope, bytearray())
        held += b"".join(keys)
        if len(held) > _KEYS_MAX * KEY_BYTES:
            self._shorten(session, scope, held)

    def take(self, session: int) -> tuple[list[tuple[Scope, Keys]], int]:
        """(what it has put, pages of it that are known to be lost); forgotten with this."""
        held = self._keys.pop(session, {})
        lost = self._lost.pop(session, 0)
        return [(scope, _array(keys)) for scope, keys in held.items()], lost

    def give_back(self, session: int, held: list[tuple[Scope, Keys]], lost: int) -> None:
        """What `take` gave, for the next flush."""
        for scope, keys in held:
            self.stored(session, scope, (key.tobytes() for key in keys))
        self._lost[session] += lost

    def end(self, session: int) -> None:
        self._keys.pop(session, None)
        self._lost.pop(session, None)

    def _shorten(self, session: int, scope: Scope, held: bytearray) -> None:
        """Forgets what is durable or gone by now, and past that the oldest: as if it were lost."""
        keys = _array(held)
        is_in_host = self._store.survey.in_tier(*scope, keys, Tier.HOST)
        is_durable = self._store.survey.in_tier(*scope, keys, Tier.NVME)
        left = keys[is_in_host & ~is_durable]
        kept = left[-(_KEYS_MAX // 2) :]
        self._lost[session] += len(left) - len(kept) + int((~is_in_host & ~is_durable).sum())
        held[:] = kept.tobytes()


def _array(keys: bytearray) -> Keys:
    """Each of them once."""
    every = np.frombuffer(keys, f"V{KEY_BYTES}").tolist()
    return np.frombuffer(b"".join(dict.fromkeys(every)), np.uint8).reshape(-1, KEY_BYTES)
