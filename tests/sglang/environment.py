"""Where the real SGLang of `make sglang-env`, and the real Dynamo of `make dynamo-env`, are, for
tests and benchmarks.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["DYNAMO", "ENVIRONMENT", "HERE"]

HERE = Path(__file__).resolve().parent
#: SGLang pins packages that kvtier's own environment has in other versions, and no engine shares
#: one with its cache.
ENVIRONMENT = HERE.parent.parent / ".sglang-env"
DYNAMO = HERE.parent.parent / ".dynamo-env"
