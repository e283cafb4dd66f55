"""A model from where it lies: a Hugging Face directory, or a GGUF file as SmolLM2's package has.

Loads no transformers and asks no network. The revision names these very weights, so that KV of
others is never found under it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtier_engine.errors import ModelUnusable
from kvtier_engine.model.config import ModelConfig
from kvtier_engine.model.llama import Llama
from kvtier_engine.model.tokens import Tokenizer
from kvtier_engine.model.weights import Weights, read_safetensors
from kvtier_engine.smollm2 import read_gguf

__all__ = ["LoadedModel", "load_model"]

_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A network with its tokens. `revision` changes with any byte of the weights."""

    name: str
    revision: str
    network: Llama
    tokenizer: Tokenizer


def load_model(
    place: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    revision: str = "",
    name: str = "",
) -> LoadedModel:
    """Loads a directory or a *.gguf file. Raises ModelUnusable.

    Without `revision` it is that of kvtier.json, or a hash over the weight files (which takes a
    second a gigabyte).
    """
    if place.suffix == ".gguf":
        return _from_gguf(place, dtype=dtype, device=torch.device(device), name=name)
    settings = _read_json(place / "config.json")
    config = ModelConfig.from_hf(
        settings, _read_json(place / "generation_config.json", needed=False)
    )
    tensors = read_safetensors(place)
    weights = Weights.of(config, tensors, dtype=dtype, device=torch.device(device))
    return LoadedModel(
        name=name or place.name,
        revision=revision or _revision(place),
        network=Llama(config, weights),
        tokenizer=Tokenizer.from_directory(place),
    )


def _from_gguf(place: Path, *, dtype: torch.dtype, device: torch.device, name: str) -> LoadedModel:
    read = read_gguf(place)
    config = ModelConfig.from_hf(read.config)
    files = read.tokenizer_files
    settings = files["tokenizer_config.json"]
    assert isinstance(settings, Mapping)
    return LoadedModel(
        name=name or place.stem,
        revision=read.revision,
        network=Llama(config, Weights.of(config, read.weights, dtype=dtype, device=device)),
        tokenizer=Tokenizer.from_text(str(files["tokenizer.json"]), settings),
    )


def _read_json(file: Path, *, needed: bool = True) -> dict[str, Any]:
    if not needed and not file.is_file():
        return {}
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnusable(
            f"{file} cannot be read: {error}", remedy="name a directory with a config.json"
        ) from error
    if not isinstance(read, dict):
        raise ModelUnusable(f"{file} holds no object", remedy="name a Hugging Face directory")
    return read


def _revision(directory: Path) -> str:
    made = _read_json(directory / "kvtier.json", needed=False).get("revision")
    if isinstance(made, str):
        return made
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()[:32]
