"""Makes the cache of a policy: with compiled loops where there are some and numba can be used. Both
kinds have the same outcome. Any thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.bench.cache import Cache
from kvtier.packing.optional_code import load_optional

__all__ = ["make_cache"]


def make_cache(parent: npt.NDArray[np.int32], slots: int, policy: str) -> Cache:
    """As `Cache`."""
    if policy == "lru":
        try:
            made: Cache = load_optional("kvtier.bench.fast_cache").FastCache(parent, slots)
        except ImportError:
            return Cache(parent, slots, policy)
        return made
    return Cache(parent, slots, policy)
