"""Reading of images: names alone."""

from __future__ import annotations

from torchvision.refusing import stand_in as __getattr__  # noqa: F401


class ImageReadMode:
    RGB = 1
