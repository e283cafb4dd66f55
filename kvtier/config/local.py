"""The section of the configuration about the local plane.

Part of `kvtier.config`, which has the rules and from which everything here is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvtier.config.fields import whole
from kvtier.config.kinds import Choice

__all__ = ["LocalConfig", "Switch"]


class Switch(Enum):
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """Shared memory for clients of this host."""

    plane: Switch = field(
        default=Switch.ON,
        metadata={
            "kind": Choice(members=Switch),
            "meaning": "Whether processes of the daemon's user on this host may find and read "
            "pages in shared memory, without asking. The control socket has mode 0600 and "
            "lies beside the first unix socket of daemon.listen, with `.local` behind its name, or "
            "without one in daemon.directory.",
        },
    )
    grant_ms: int = whole(
        5_000,
        "How long a client may write to a slot of host memory that it was granted. A slot that was "
        "not given back by then is out of use until its holder gives it back or ends.",
        low=100,
        high=600_000,
        unit="ms",
    )
