"""Why everything is a miss, or that it need not be."""

from __future__ import annotations

from enum import Enum

__all__ = ["StoreState"]


class StoreState(Enum):
    OPEN = "open"
    #: Weights are being updated, or KV of others is left in SGLang.
    PAUSED = "paused"
    #: Resumed, and the daemon has not let it open the namespaces yet; it is asked once a second.
    WAITING = "waiting"
    #: The daemon has other weights under this family, or was not there to say; it is asked once a
    #: second.
    REFUSED = "refused"
