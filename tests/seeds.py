"""Seeds of random tests: few in the ordinary run, all of them in the long one."""

from __future__ import annotations

import pytest
from _pytest.mark.structures import ParameterSet

__all__ = ["seeds"]


def seeds(few: int, *, of: int) -> list[int | ParameterSet]:
    """The first `few` of `of` seeds, and the others marked for `make soak`."""
    return [*range(few), *(pytest.param(n, marks=pytest.mark.soak) for n in range(few, of))]
