"""Torch, only if it is there and only when a tensor is at hand.

Importing kvtier must not load torch (seconds, hundreds of megabytes), so the modules that need it
ask here at call time.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, TypeGuard

from kvtier.errors import MissingExtra

if TYPE_CHECKING:
    import torch

__all__ = ["is_tensor", "load_torch"]


def load_torch() -> ModuleType:
    """The torch module. Raises MissingExtra where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("torch is not installed", remedy="pip install torch") from error
    return torch


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether `value` is a torch tensor, without loading torch to find out. While another thread
    loads it there are no tensors yet.
    """
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(value, kind)
