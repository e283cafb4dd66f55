"""What the bundled engine raises beside kvtier's own errors, and the check for its extra."""

from __future__ import annotations

from importlib.util import find_spec

from kvtier.errors import InvalidInput, KvtierError, MissingExtra

__all__ = [
    "DemoFailed",
    "EngineClosed",
    "EngineInconsistent",
    "EngineStarted",
    "InvalidRequest",
    "KvTagMismatch",
    "ModelUnusable",
    "QueueFull",
    "RequestCancelled",
    "RequestFailed",
    "TaskInvalid",
    "require_extra",
]

_EXTRA = ("torch", "safetensors", "tokenizers", "gguf", "jinja2", "starlette", "uvicorn")


class ModelUnusable(KvtierError):
    """The model file is missing, or is not what this engine can run."""


class DemoFailed(KvtierError):
    """A process of the demo ended without its result."""


class InvalidRequest(KvtierError, ValueError):
    """A request that cannot be served as it is: its prompt or its settings; nothing was started."""


class TaskInvalid(InvalidInput):
    """A line of questions or tool tasks that is none; the message names file and line."""


class QueueFull(KvtierError):
    """More requests wait than the engine lets; come back later."""


class RequestCancelled(KvtierError):
    """The one who asked gave the request up."""


class RequestFailed(KvtierError):
    """The model computed something that is no answer (say NaN); this request alone ends."""


class KvTagMismatch(KvtierError):
    """The request's page table names pages that are not the ones it was given; it alone ends."""


class EngineClosed(KvtierError):
    """The engine was closed before the request was done, or before it was asked."""


class EngineStarted(KvtierError):
    """`start` of an engine whose loop runs already."""


class EngineInconsistent(KvtierError):
    """The engine's own accounts do not add up when it is idle: a defect."""


def require_extra() -> None:
    """Raises MissingExtra unless all of kvtier[engine] is there. Imports none of it."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"the bundled engine needs {', '.join(missing)}",
            remedy="pip install 'kvtier[engine]'",
        )
