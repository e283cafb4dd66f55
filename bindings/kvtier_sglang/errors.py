"""What this binding raises beside kvtier's own errors."""

from __future__ import annotations

from kvtier.errors import KvtierError

__all__ = ["UnsupportedSglang"]


class UnsupportedSglang(KvtierError):
    """This version of SGLang lacks something that the binding cannot do without."""
