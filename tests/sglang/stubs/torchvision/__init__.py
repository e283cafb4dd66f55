"""Stands for torchvision, which SGLang imports and the tests never use: its wheels need CUDA."""

from __future__ import annotations

from . import io, transforms

__all__ = ["io", "transforms"]

__version__ = "0.0.0+stub"
