"""What only the daemon needs is an extra, so that an engine's environment stays small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.errors import MissingExtra

__all__ = ["daemon_extra"]

_MODULES = ("aiofiles", "grpc_health", "grpc_reflection", "prometheus_client")


@contextmanager
def daemon_extra() -> Iterator[None]:
    """For imports of kvtier.daemon: raises MissingExtra when its dependencies are not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _MODULES:
            raise
        raise MissingExtra(
            f"the daemon's {error.name} is not installed", remedy="pip install 'kvtier[daemon]'"
        ) from error
