"""Which prefixes of a prompt are restorable, by what each pool has of it: the rules of SGLang's
interface v2 (`PoolHitPolicy`, and what `HiCacheFile.batch_exists_v2` makes of them).

Pure functions of values; nothing of SGLang is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

__all__ = ["HitRule", "restorable"]


class HitRule(Enum):
    """The values are those of SGLang's PoolHitPolicy."""

    #: Every page of a prefix has to be there.
    ALL_PAGES = "all_pages"
    #: The last pages of a prefix have to be, however many there are before them.
    TRAILING_PAGES = "trailing_pages"


def restorable(there: Sequence[bool], rule: HitRule, window: int) -> list[int]:
    """The lengths of prefixes, in pages, ascending from 1, that a pool can restore which has the
    pages `there`. `window` is how many pages TRAILING_PAGES wants before the end of a prefix; at
    its beginning there are fewer.
    """
    lengths, run = [], 0
    for length, is_there in enumerate(there, 1):
        run = run + 1 if is_there else 0
        if rule is HitRule.ALL_PAGES:
            if run < length:
                break
        elif run < min(max(1, window), length):
            continue
        lengths.append(length)
    return lengths
