"""The second version of the transforms: names alone."""

from __future__ import annotations

from torchvision.transforms import InterpolationMode

from . import functional

__all__ = ["InterpolationMode", "functional"]
