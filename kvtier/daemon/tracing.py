"""Trace contexts that callers send along (W3C `traceparent`): checked, and logged at level debug.

A context is a hint: one that is none is left out, and never changes an answer. Any thread.
"""

from __future__ import annotations

import logging
import re

__all__ = ["log_trace"]

log = logging.getLogger(__name__)

#: Version, trace id, parent id, flags. Later versions may carry more after a dash.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]{1,64})?")


def log_trace(rpc: str, traceparent: str) -> None:
    """Says which trace this call belongs to, if it says so itself."""
    if traceparent and _TRACEPARENT.fullmatch(traceparent):
        log.debug("rpc.traced", extra={"rpc": rpc, "traceparent": traceparent})
