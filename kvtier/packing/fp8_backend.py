"""Which implementation of the fp8 codec serves which memory, and whether that is the fast one.

Compiled code is loaded once a process, by the first who asks; where it cannot be had, torch does
the same work (some ten times slower on the CPU), and one warning `fp8.fallback` says so. Safe from
any thread: whoever comes while it is loaded waits.
"""

from __future__ import annotations

import logging
import sys
import threading
from enum import Enum
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Final, NamedTuple

from kvtier.errors import MissingExtra
from kvtier.packing._torch import load_torch
from kvtier.packing.optional_code import load_optional

__all__ = ["Fp8Backend", "backend", "compiled", "require_backend"]

log = logging.getLogger(__name__)


class Fp8Backend(Enum):
    """All give the same bytes. TORCH is the reference, and what is used without the others."""

    NUMBA = "numba"
    TRITON = "triton"
    TORCH = "torch"


class _Compiled(NamedTuple):
    backend: Fp8Backend
    module: str
    remedy: str


#: By torch's name for the kind of memory.
_COMPILED: Final = {
    "cpu": _Compiled(
        Fp8Backend.NUMBA, "kvtier.packing.fp8_numba", "pip install 'kvtier[fast]' (numba)"
    ),
    "cuda": _Compiled(
        Fp8Backend.TRITON, "kvtier.packing.fp8_triton", "pip install triton (NVIDIA devices)"
    ),
}
_LOADING: Final = threading.Lock()


def backend(device: str = "cpu") -> Fp8Backend:
    """What packs memory of this kind ("cpu", "cuda") in this process. Loads it, which can take
    seconds. Raises MissingExtra where nothing can.
    """
    if compiled(device) is not None:
        return _COMPILED[device].backend
    load_torch()
    return Fp8Backend.TORCH


def compiled(device: str) -> ModuleType | None:
    """The module with compiled `pack` and `unpack` for memory of this kind; None: torch has to.

    Raises MissingExtra where torch is not there either.
    """
    with _LOADING:
        return _load(device)


def require_backend() -> None:
    """Raises MissingExtra where host memory cannot be packed, without loading anything."""
    if not any(sys.modules.get(name) or find_spec(name) for name in ("numba", "torch")):
        raise _missing()


@cache
def _load(device: str) -> ModuleType | None:
    wanted = _COMPILED.get(device)
    if wanted is None:
        return None
    try:
        # By name, as importing it is what compiles it.
        return load_optional(wanted.module)
    except ImportError as error:
        try:
            load_torch()
        except MissingExtra:
            raise _missing() from error
        fields = {"device": device, "instead": Fp8Backend.TORCH.value, "error": str(error)}
        log.warning(
            "torch packs fp8 pages, some ten times slower (%s); %s",
            str(error),
            wanted.remedy,
            extra={"event": "fp8.fallback", **fields, "remedy": wanted.remedy},
        )
        return None


def _missing() -> MissingExtra:
    return MissingExtra(
        "packing and unpacking fp8 pages needs numba or torch",
        remedy="pip install 'kvtier[fast]' (numba), or pip install torch",
    )
