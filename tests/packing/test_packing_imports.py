"""Importing the package loads no framework and no transport."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ["torch", "grpc", "google.protobuf", "transformers", "numba", "llvmlite", "ml_dtypes"]
HEAVY += ["asyncio", "triton"]


def test_packing_loads_nothing_heavy():
    code = f"""if True:
        import importlib, pkgutil, sys
        import kvtier.packing
        assert "numpy" not in sys.modules, "a layout needs no numpy"
        for module in pkgutil.iter_modules(kvtier.packing.__path__):
            if not module.name.endswith(("_kernels", "_numba", "_triton")):
                importlib.import_module("kvtier.packing." + module.name)
        found = [name for name in {HEAVY!r} if name in sys.modules]
        assert not found, found
    """
    subprocess.run([sys.executable, "-c", code], check=True)
