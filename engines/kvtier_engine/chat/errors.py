"""What can go wrong with the server that a chat talks to."""

from __future__ import annotations

from kvtier.errors import InvalidInput, KvtierError

__all__ = [
    "KeyInvalid",
    "ServerAbsent",
    "ServerRefused",
    "ServerSilent",
    "ServerUnreadable",
    "UrlInvalid",
]


class UrlInvalid(InvalidInput):
    """The address of a server that is none."""


class KeyInvalid(InvalidInput):
    """The key for a server cannot be sent; it is not in the message."""


class ServerAbsent(KvtierError):
    """Nobody answers at that address."""


class ServerSilent(KvtierError):
    """Somebody took the connection, and then said nothing of an answer for too long."""


class ServerRefused(KvtierError):
    """The server answered with an error."""


class ServerUnreadable(KvtierError):
    """What came is no answer of OpenAI's API, or ends in the middle of one."""
