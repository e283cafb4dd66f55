"""Every test of the tiers is audited for leaks."""

from __future__ import annotations

from kvtier.testing.leaks import leak_audit

__all__ = ["leak_audit"]
