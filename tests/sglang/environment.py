"""Where the real SGLang of `make sglang-env` is, for tests and benchmarks."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ENVIRONMENT", "HERE"]

HERE = Path(__file__).resolve().parent
#: SGLang pins packages that kvtier's own environment has in other versions, and no engine shares
#: one with its cache.
ENVIRONMENT = HERE.parent.parent / ".sglang-env"
