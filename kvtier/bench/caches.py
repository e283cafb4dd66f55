"""Whether numba can be used; and the cache of a policy, with compiled loops where there are some
and it can: both kinds have the same outcome. Any thread.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.bench.cache import Cache
from kvtier.packing.optional_code import load_optional

__all__ = ["NUMBA_REMEDY", "make_cache", "warm_up", "without_numba"]

NUMBA_REMEDY: Final = "pip install 'kvtier[bench]', and leave NUMBA_DISABLE_JIT unset"


def without_numba() -> str | None:
    """Why numba cannot be used, or None."""
    try:
        load_optional("kvtier.packing.jit_numba")
    except ImportError as error:
        return str(error)
    return None


def warm_up() -> None:
    """Compiles the bench's loops now, for every process that comes later; they are compiled when
    they are first needed otherwise. Does nothing where numba cannot be used."""
    with suppress(ImportError):  # whoever needs them does without, or says why it cannot
        for kind in ("cache", "lru", "use"):
            load_optional(f"kvtier.bench.{kind}_kernels")


def make_cache(
    parent: npt.NDArray[np.int32], slots: int, policy: str, *, ttl_s: float = 0.0
) -> Cache:
    """As `Cache`."""
    if policy == "lru" and not ttl_s:
        try:
            made: Cache = load_optional("kvtier.bench.fast_cache").FastCache(parent, slots)
        except ImportError:
            return Cache(parent, slots, policy)
        return made
    return Cache(parent, slots, policy, ttl_s=ttl_s)
