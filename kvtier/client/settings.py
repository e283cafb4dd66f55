"""What a connection is set to. Values, usable from any thread."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum

from kvtier.errors import InvalidConfigValue

__all__ = ["PlaneChoice", "Settings", "Verify", "checked_seconds"]


class Verify(Enum):
    """Whether a get compares payload sums. SAMPLED does one page in SAMPLE_ONE_IN."""

    ALWAYS = "always"
    SAMPLED = "sampled"
    OFF = "off"


class PlaneChoice(Enum):
    """AUTO reads shared memory where the daemon offers it to this process; GRPC never does."""

    AUTO = "auto"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    deadline_s: float
    verify: Verify
    client_name: str
    plane: PlaneChoice = PlaneChoice.AUTO

    @classmethod
    def of(cls, *, deadline: float, verify: str, client_name: str, plane: str) -> Settings:
        """Raises InvalidConfigValue."""
        try:
            wanted = Verify(verify)
        except ValueError:
            raise InvalidConfigValue(
                f"verify is {verify!r}", remedy='use "always", "sampled" or "off"'
            ) from None
        try:
            choice = PlaneChoice(plane)
        except ValueError:
            raise InvalidConfigValue(f"plane is {plane!r}", remedy='use "auto" or "grpc"') from None
        return cls(
            deadline_s=checked_seconds(deadline),
            verify=wanted,
            client_name=client_name,
            plane=choice,
        )


def checked_seconds(deadline: object) -> float:
    """Raises InvalidConfigValue unless `deadline` is a positive number of seconds."""
    if not isinstance(deadline, int | float) or not 0 < deadline <= sys.float_info.max:
        raise InvalidConfigValue(
            f"deadline is {deadline!r}", remedy="pass a positive number of seconds"
        )
    return float(deadline)
