"""kvtier: KV cache tiering and transfer for LLM inference.

    with kvtier.connect("unix:///run/kvtier/kvtier.sock") as kv:
        ns = kv.namespace(layout)
        got = ns.get(ns.keys(token_ids), out=pool)

Importing this package loads nothing but this file: every name below loads its module when it is
first used, so that neither grpc nor protobuf nor torch is paid for before it is needed.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtier._version import __version__

if TYPE_CHECKING:
    from kvtier import aio, errors
    from kvtier.client.sync import connect
    from kvtier.client.warm import warm_up
    from kvtier.core.page import Codec, Durability, GetCode, PageRef, PutCode, Tier
    from kvtier.errors import (
        Busy,
        ClientClosed,
        CorruptPage,
        DaemonUnavailable,
        DeadlineExceeded,
        ForkedClient,
        GenerationConflict,
        KeyLengthError,
        KvtierError,
        LayoutError,
        LeaseExpired,
        LimitExceeded,
        MissingExtra,
        NamespaceMismatch,
        NonFinite,
        NotDurable,
        NotImplementedYet,
        PageSizeError,
        StaleGeneration,
        UnknownNamespace,
    )
    from kvtier.packing.layout import Layout, Role, ScaleRule, Segment, Shard

__all__ = [
    "Busy",
    "ClientClosed",
    "Codec",
    "CorruptPage",
    "DaemonUnavailable",
    "DeadlineExceeded",
    "Durability",
    "ForkedClient",
    "GenerationConflict",
    "GetCode",
    "KeyLengthError",
    "KvtierError",
    "Layout",
    "LayoutError",
    "LeaseExpired",
    "LimitExceeded",
    "MissingExtra",
    "NamespaceMismatch",
    "NonFinite",
    "NotDurable",
    "NotImplementedYet",
    "PageRef",
    "PageSizeError",
    "PutCode",
    "Role",
    "ScaleRule",
    "Segment",
    "Shard",
    "StaleGeneration",
    "Tier",
    "UnknownNamespace",
    "__version__",
    "aio",
    "connect",
    "errors",
    "warm_up",
]

# A program without logging of its own sees none of the library's; what happened is in `kv.local`.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_MODULES = ("aio", "errors")
_PAGE = ("Codec", "Durability", "GetCode", "PageRef", "PutCode", "Tier")
_LAYOUT = ("Layout", "Role", "ScaleRule", "Segment", "Shard")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name == "connect":
        module = "kvtier.client.sync"
    elif name == "warm_up":
        module = "kvtier.client.warm"
    elif name in _PAGE:
        module = "kvtier.core.page"
    elif name in _LAYOUT:
        module = "kvtier.packing.layout"
    else:
        module = "kvtier.errors"
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
