"""Python runs this at the start of every process of a test server: SGLang's host pools are changed
as soon as they are imported, as far as they have to be where there is no accelerator (see shim).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_POOLS = "sglang.srt.mem_cache.pool_host"


def _change(module: ModuleType) -> None:
    import shim

    if module.__name__ == f"{_POOLS}.base":
        shim.leave_memory_unpinned(module)
    else:
        shim.give_copies(module)


class Changes(MetaPathFinder):
    """Lets the others find a module, and changes it when it has been loaded."""

    def __init__(self, *names: str) -> None:
        self._names = set(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        self._names.remove(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            _change(module)

        spec.loader.exec_module = load_and_change
        return spec


sys.meta_path.insert(0, Changes(f"{_POOLS}.base", f"{_POOLS}.mha", f"{_POOLS}.mla"))
