"""Transforms of images: names alone."""

from __future__ import annotations

from enum import StrEnum

from torchvision.refusing import stand_in as __getattr__  # noqa: F401


class InterpolationMode(StrEnum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


from . import functional  # noqa: E402, F401
