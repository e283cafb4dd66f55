"""What the server refuses, beside the engine's own errors. Each becomes one answer (`answers.py`)
but NetworkUnprotected, which ends the command.
"""

from __future__ import annotations

from kvtier.errors import KvtierError

__all__ = ["ArgumentInvalid", "ContextExceeded", "NetworkUnprotected", "UnknownModel"]


class ArgumentInvalid(KvtierError, ValueError):
    """A body, or one of its fields (`param`, where it is known), that cannot be served."""

    def __init__(self, message: str, *, remedy: str, param: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.param = param


class ContextExceeded(KvtierError, ValueError):
    """Prompt and answer do not fit into the model's context, or into the pool."""

    def __init__(self, message: str, *, remedy: str, param: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.param = param


class UnknownModel(KvtierError):
    """A request for a model that is not served here."""


class NetworkUnprotected(KvtierError):
    """Anybody on the network could use the server, and nobody said that this is meant."""
