"""What tests with a real SGLang share: its environment, and a process there that walks."""

from __future__ import annotations

import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.environment import ENVIRONMENT, HERE

__all__ = ["ENVIRONMENT", "HERE", "Walks", "needs_sglang"]

_LOAD_S = 120.0
_WALK_S = 150.0

needs_sglang = pytest.mark.skipif(
    not (ENVIRONMENT / ".installed").exists(), reason="needs a real SGLang: make sglang-env"
)


class Walks:
    """A process with hicache_walks.py. Close it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(ENVIRONMENT / "bin" / "python"), str(HERE / "hicache_walks.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        self._answer(_LOAD_S)

    def write(self, **setup: Any) -> dict[str, Any]:
        """A prompt through an engine to storage; what hicache_walks.write says of it."""
        return self._walk("write", setup)

    def read(self, **setup: Any) -> dict[str, Any]:
        """A fresh engine that asks storage for the prompt."""
        return self._walk("read", setup)

    def read_by(self, **setup: Any) -> dict[str, Any]:
        """As `read`, and which way the bytes came."""
        return self._walk("read by", setup)

    def conform(self, **setup: Any) -> dict[str, Any]:
        """The verdict of each conformance check, and its reason."""
        return self._walk("conform", setup)

    def differ(self, **setup: Any) -> dict[str, Any]:
        """What the same random calls came to; see hicache_walks.differ."""
        return self._walk("differ", setup)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout):
            stream.close()

    def _walk(self, walk: str, setup: dict[str, Any]) -> dict[str, Any]:
        request = json.dumps({"walk": walk, "setup": setup}) + "\n"
        self._process.stdin.write(request.encode())
        self._process.stdin.flush()
        return self._answer(_WALK_S)

    def _answer(self, seconds: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else b""
        assert line, f"no answer in {seconds:g} s:\n{self.log[-4000:]}"
        return json.loads(line)
