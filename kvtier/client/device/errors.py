"""What a device pool raises beside kvtier's own errors."""

from __future__ import annotations

from kvtier.errors import IntegrityError, InvalidInput, ResourceError

__all__ = ["PageNotHeld", "PoolExhausted", "PoolInconsistent", "PoolNameTaken"]


class PoolExhausted(ResourceError):
    """Fewer free pages than were asked for; none was given."""


class PageNotHeld(InvalidInput):
    """A page id that nobody holds (freed already, or never given out) or that the pool lacks."""


class PoolInconsistent(IntegrityError):
    """The accounts of a pool do not add up: a defect, found by `check`."""


class PoolNameTaken(InvalidInput):
    """Another pool of this name is told of over the same connection: they would hide each other."""
