"""Model directories for servers, and prompts that share no page."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import load_file, save_file

__all__ = ["other_weights", "prompt"]

_WEIGHTS = "model.safetensors"
_LEFT_OUT = 10
_SENTENCE = "The keeper of the lighthouse at {} wrote in his journal what the sea had brought. "


def prompt(name: str, sentences: int = 12) -> str:
    """Some 25 tokens a sentence; another name is another first page."""
    return _SENTENCE.format(name) * sentences + "On the last evening he wrote:"


def other_weights(model: Path, out: Path) -> Path:
    """The model without what a layer in the middle adds; everything else is linked to."""
    out.mkdir()
    for path in model.iterdir():
        if path.name != _WEIGHTS:
            os.symlink(path, out / path.name)
    weights = load_file(model / _WEIGHTS)
    for name in ("mlp.down_proj", "self_attn.o_proj"):
        weights[f"model.layers.{_LEFT_OUT}.{name}.weight"].zero_()
    save_file(weights, out / _WEIGHTS, metadata={"format": "pt"})
    return out
