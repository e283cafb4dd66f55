"""Loading beforehand what the first calls of a process would have to wait for."""

from __future__ import annotations

from kvtier.packing.bulk_sums import load_summer
from kvtier.packing.fp8 import warm_up as warm_up_fp8
from kvtier.transfer.local.loading import load_kernels

__all__ = ["warm_up"]


def warm_up() -> None:
    """Loads the compiled code for shared memory and FP8, and compiles it where no earlier process
    has: half a second, or up to a minute the first time on a machine. Safe from any thread, and
    before a fork.

    Raises MissingExtra where FP8 pages cannot be packed at all (neither numba nor torch).
    """
    load_kernels()
    load_summer()
    warm_up_fp8()
