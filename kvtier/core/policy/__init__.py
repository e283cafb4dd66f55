"""Eviction policies by their names in the configuration."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.core.policy.arc import Arc
from kvtier.core.policy.base import Policy
from kvtier.core.policy.lru import Clock, LruTailFirst
from kvtier.core.policy.s3fifo import S3Fifo
from kvtier.core.table import CopyTable

__all__ = ["POLICIES"]

#: Each makes the queue of one size class of one tier.
POLICIES: dict[str, Callable[[CopyTable, Clock], Policy]] = {
    "lru": LruTailFirst,
    "arc": Arc,
    "s3-fifo": S3Fifo,
}
