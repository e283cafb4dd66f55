"""By which names the pages of a server are known: what it says of its model, and what its options
say instead.

Promise: servers have the same names if they compute the same KV from the same tokens, as far as it
is told by model, weights, the settings of the model's configuration (a rotary embedding that is
stretched for long prompts, say), and what makes other numbers of the weights while they are loaded.
Which kernels compute, and how those round, is no part of them.

Pure functions of values; nothing of SGLang or torch is loaded.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Final

from kvtier_sglang.layouts import Identity, number_format
from kvtier_sglang.options import Options

if TYPE_CHECKING:
    from kvtier_sglang.sglang_api import ServedModel

__all__ = ["form_of", "identity_of", "revision_of"]

_DIGEST_CHARACTERS: Final = 32
#: Values of --load-format that read a checkpoint as it is. Any other is a name of its own.
_AS_IT_IS: Final = frozenset({
    "auto", "fastsafetensors", "gguf", "instanttensor", "layered", "mistral", "npcache",
    "presharded", "pt", "remote", "remote_instance", "runai_streamer", "safetensors",
    "sharded_state",
})  # fmt: skip


def identity_of(
    served: ServedModel,
    options: Options,
    *,
    name: str,
    updated_to: str,
    pool_format: str,
    itemsize: int,
) -> Identity:
    """`name` is what the model is called where it has no path; `updated_to` see `revision_of`;
    the rest is of the numbers in the host pool. Raises LayoutError, see layouts.number_format.
    """
    model = options.model_id or served.path or name
    return Identity(
        model_id=", ".join(filter(None, (model, form_of(served)))),
        weights_revision=revision_of(served, options, updated_to),
        kv_format=number_format(options.kv_dtype or served.kv_cache_dtype, pool_format, itemsize),
    )


def form_of(served: ServedModel) -> str:
    """What the server makes of the checkpoint; empty where it takes it as it is."""
    load_format = "" if served.load_format in _AS_IT_IS else served.load_format
    return ", ".join(
        filter(None, (_digest(served.overrides), served.quantization, load_format)),
    )


def revision_of(served: ServedModel, options: Options, updated_to: str) -> str:
    """`updated_to` is the name that an online update gave to the weights, "" before the first."""
    if options.weights_revision and not updated_to:
        return options.weights_revision
    # A version stands beside the checkpoint's own revision.
    started_with = options.weights_revision or served.revision or "unstated"
    version = updated_to or served.weight_version or "default"
    return " ".join((started_with, version, *filter(None, (served.kv_scales,))))


def _digest(overrides: str) -> str:
    """Of settings in JSON, however they are written; empty for none."""
    try:
        settings = json.loads(overrides or "{}")
    except ValueError:
        settings = overrides
    if not settings:
        return ""
    written = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(written.encode()).hexdigest()
    return f"configuration {digest[:_DIGEST_CHARACTERS]}"
