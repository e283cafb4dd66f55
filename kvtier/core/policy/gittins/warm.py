"""Every kernel of the policy called once, so that it is compiled before a page waits for it."""

from __future__ import annotations

import numpy as np

from kvtier.core.policy.gittins.policy import Gittins
from kvtier.core.policy.gittins.segments import sweep_curves
from kvtier.core.policy.lru import Clock
from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["warm_up"]

_ROWS = 64
_CHAINS = 80
_PAGES = 4


def warm_up() -> None:
    """Compiles what is not in numba's cache: most of a minute the first time on a machine."""
    for has_bypass in (False, True):
        table, clock = CopyTable(_ROWS), Clock()
        policy = Gittins(table, clock, has_bypass=has_bypass)
        for chain in range(_CHAINS):
            clock.seconds = 1.0 + 40.0 * chain
            rows = table.take_many(_PAGES)
            while len(rows) < _PAGES:
                row = policy.evict(lambda _: True)
                if row == NO_ROW:
                    return
                table.parent[row] = 0
                rows.append(row)
            for at, row in enumerate(rows):
                table.set_key(row, bytes([1 + at, chain]) * 16)
                table.queued[row] = 0
                table.parent[row] = rows[at - 1] + 1 if at else 0
            policy.admit_many(np.array(rows[:2], np.int64))
            policy.admit_many(np.array(rows[2:], np.int64))  # of the same chain: it grows
            clock.seconds += 10.0
            policy.touch(np.array(rows[:3], np.int64))
            policy.lead(rows[2])
            policy.hint(0, table.key(rows[0]), 5.0)
            policy.keep(rows[0])
            policy.ready(rows[0])
            policy.coldest()
            words = policy.words_of(np.array(rows, np.int64))
            policy.takes(words)
        sweep_curves(policy.forecast.arrays)
        policy.request(clock.seconds, words, output=1)
        policy.takes(words)
        policy.forget(rows[3])
