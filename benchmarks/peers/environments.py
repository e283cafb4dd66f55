"""Where the peers are installed: a virtual environment each, in a folder that git ignores.

Their dependencies pin what kvtier leaves open, so they are never in kvtier's own environment. Pure
functions over paths; any thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Environment"]

ROOT = Path(__file__).resolve().parent.parent.parent / ".peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    name: str
    root: Path = ROOT

    @property
    def home(self) -> Path:
        return self.root / self.name

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """Written when everything is installed and has been imported once."""
        return self.home / ".installed"

    @property
    def system(self) -> Path:
        """System libraries that the machine does not have."""
        return self.home / "system"

    def is_installed(self) -> bool:
        return self.stamp.exists() and self.python.exists()

    def variables(self) -> dict[str, str]:
        """The environment variables to start a process of it with."""
        folders = sorted({str(path.parent) for path in self.system.rglob("*.so*")})
        given = os.environ.get("LD_LIBRARY_PATH")
        paths = folders + ([given] if given else [])
        return dict(os.environ) | ({"LD_LIBRARY_PATH": ":".join(paths)} if paths else {})
