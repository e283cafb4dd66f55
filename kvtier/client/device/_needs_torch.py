"""Imported before the rest of the package: says what to install where torch is missing."""

from __future__ import annotations

from kvtier.packing._torch import load_torch

load_torch()
