"""One message to a reader that may stand still: it is waited for, and then cut off, so that it
cannot keep what is being sent.

Event loop's thread.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kvtier.daemon.node import Node
from kvtier.errors import DeadlineExceeded

__all__ = ["write_to_reader"]


async def write_to_reader(node: Node, context: Any, message: Any) -> None:
    """Raises DeadlineExceeded when the reader takes nothing for `get_idle_ms`."""
    idle_s = node.config.limits.get_idle_ms / 1000
    try:
        async with asyncio.timeout(idle_s):
            await context.write(message)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the reader took nothing for {idle_s:g} s (limits.get_idle_ms)",
            remedy="Read without long pauses, or raise limits.get_idle_ms.",
        ) from None
