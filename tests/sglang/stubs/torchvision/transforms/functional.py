"""Transforms as functions: names alone."""

from __future__ import annotations

from torchvision.refusing import stand_in as __getattr__  # noqa: F401

from . import InterpolationMode

__all__ = ["InterpolationMode"]
