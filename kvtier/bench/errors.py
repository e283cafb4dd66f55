"""What is wrong with a trace, or with what was asked of one: leaves of kvtier's error tree."""

from __future__ import annotations

from kvtier.errors import InvalidInput

__all__ = ["BenchInput", "TraceError"]


class TraceError(InvalidInput):
    """A trace that cannot be read; the message begins with its file, and line where there is
    one."""


class BenchInput(InvalidInput):
    """Tiers, a model or a router that makes no sense; nothing was replayed."""
