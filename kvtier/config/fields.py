"""Fields of the sections of the configuration: a default with its kind and its meaning.

Pure helpers for `kvtier.config` and `kvtier.config.storage`; they return dataclass fields.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from kvtier.config.kinds import Seconds, Size, Whole

__all__ = ["GIB", "KIB", "MIB", "TIB", "seconds", "size", "whole"]

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40


def whole(default: int, meaning: str, *, low: int, high: int, unit: str = "") -> Any:
    return field(
        default=default, metadata={"kind": Whole(low=low, high=high, unit=unit), "meaning": meaning}
    )


def size(default: int, meaning: str, *, low: int, high: int) -> Any:
    return field(default=default, metadata={"kind": Size(low=low, high=high), "meaning": meaning})


def seconds(default: float, meaning: str, *, low: float, high: float) -> Any:
    return field(
        default=default, metadata={"kind": Seconds(low=low, high=high), "meaning": meaning}
    )
