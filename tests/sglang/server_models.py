"""Model directories for servers, and prompts that share no page."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import load_file, save_file

__all__ = ["other_weights", "prompt"]

_WEIGHTS = "model.safetensors"
_SENTENCE = "The keeper of the lighthouse at {} wrote in his journal what the sea had brought. "


def prompt(name: str, sentences: int = 12) -> str:
    """Some 25 tokens a sentence; another name is another first page."""
    return _SENTENCE.format(name) * sentences + "On the last evening he wrote:"


def other_weights(model: Path, out: Path, layer: int) -> Path:
    """The model with a layer whose output is halved; everything else is linked to."""
    out.mkdir()
    for path in model.iterdir():
        if path.name != _WEIGHTS:
            os.symlink(path, out / path.name)
    weights = load_file(model / _WEIGHTS)
    weights[f"model.layers.{layer}.mlp.down_proj.weight"] /= 2
    save_file(weights, out / _WEIGHTS, metadata={"format": "pt"})
    return out
