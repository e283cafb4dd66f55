"""What the server refuses, beside the engine's own errors. What comes of a request becomes one
answer (`answers.py`); the others end the command.
"""

from __future__ import annotations

from kvtier.errors import InvalidInput, KvtierError

__all__ = [
    "AddressUnusable",
    "ArgumentInvalid",
    "ContextExceeded",
    "DescriptorsFew",
    "NetworkUnprotected",
    "OptionUnusable",
    "ServerEnded",
    "UnknownModel",
    "UvicornUnsuitable",
]


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


class AddressUnusable(InvalidInput):
    """--host and --port name no place where this process can listen."""


class OptionUnusable(InvalidInput):
    """A flag that this machine cannot do: a device or memory that is not there."""


class DescriptorsFew(KvtierError):
    """The process may open too few files and connections to serve anybody."""


class ServerEnded(KvtierError):
    """The HTTP server ended by itself."""


class UvicornUnsuitable(KvtierError):
    """The uvicorn that is installed does not have what the connections are built on."""
