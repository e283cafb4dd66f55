"""What the bundled engine raises beside kvtier's own errors, and the check for its extra."""

from __future__ import annotations

from importlib.util import find_spec

from kvtier.errors import KvtierError, MissingExtra

__all__ = ["DemoFailed", "ModelUnusable", "require_extra"]

_EXTRA = ("torch", "transformers", "safetensors", "tokenizers", "gguf")


class ModelUnusable(KvtierError):
    """The model file is missing, or is not what this engine can run."""


class DemoFailed(KvtierError):
    """A process of the demo ended without its result."""


def require_extra() -> None:
    """Raises MissingExtra unless all of kvtier[engine] is there. Imports none of it."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"the bundled engine needs {', '.join(missing)}",
            remedy="pip install 'kvtier[engine]'",
        )
