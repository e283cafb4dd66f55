"""The second version of the transforms as functions: names alone."""

from __future__ import annotations

from torchvision.refusing import stand_in as __getattr__  # noqa: F401
from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
