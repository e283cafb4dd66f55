"""What a page's bytes are: layout, checksums, record header, keys and codecs.

Everything here is a pure function of its arguments and safe to call from any thread. Importing it
loads neither torch nor a transport.
"""

from __future__ import annotations

from kvtier.packing.layout import Layout, Role, ScaleRule, Segment, Shard, Span

__all__ = ["Layout", "Role", "ScaleRule", "Segment", "Shard", "Span"]
