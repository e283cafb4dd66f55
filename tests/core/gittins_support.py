"""The Gittins policy with its kernels as they are written: to compile them takes most of a minute.

Import this before anything of the policy. In a process that has imported that compiled, it stays
so; the tests mean the same.
"""

from __future__ import annotations

import pytest

config = pytest.importorskip("numba", reason="numba is not installed").config

_was_off = config.DISABLE_JIT
config.DISABLE_JIT = True
from kvtier.core.policy.gittins import (  # noqa: E402
    buckets,
    forecast,
    index,
    layout,
    pages,
    policy,
    segments,
)

config.DISABLE_JIT = _was_off

__all__ = ["buckets", "forecast", "index", "layout", "pages", "policy", "segments"]
