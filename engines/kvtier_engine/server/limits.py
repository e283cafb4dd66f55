"""What one server gives to its clients before it refuses. A value, usable from any thread."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes, counts and seconds, each for the reason beside it."""

    body_bytes_max: int = 8 << 20
    head_bytes_max: int = 64 << 10
    #: What a client may send of its next request while the one before is answered.
    early_bytes_max: int = 64 << 10
    #: Bodies of all connections together, from their first byte until they are answered.
    bodies_bytes_max: int = 64 << 20
    #: Over it a connection is answered 503, over twice as many it is dropped.
    connections_max: int = 1024
    #: Requests whose text waits to become tokens.
    encodings_max: int = 64
    #: Without a request on a connection.
    idle_seconds_max: float = 75.0
    #: From the first byte of a request to its last.
    request_seconds_max: float = 60.0
    #: Until a client has taken enough of what was sent that more may be sent.
    write_seconds_max: float = 30.0
    #: What a refused client may go on to send, so that it sees the answer and not a reset.
    linger_bytes_max: int = 32 << 20
    linger_seconds_max: float = 5.0
    #: For those who are being answered when the server ends.
    shutdown_seconds_max: float = 5.0
    #: With work to do, and no step of the engine.
    stall_seconds_max: float = 60.0
