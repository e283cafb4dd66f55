"""Functions that can be imported by any name, and say what they are when they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__all__ = ["stand_in"]


def stand_in(name: str) -> Callable[..., NoReturn]:
    """A function of this name. Raises AttributeError for names that Python itself asks for."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_args: object, **_options: object) -> NoReturn:
        raise RuntimeError(f"torchvision is a stub here, and has no {name}")

    return refuse
