"""Tiny random models of transformers, saved as Hugging Face directories. transformers is loaded by
the first of them, not by whoever collects the tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.engine.engine_rig import save_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
#: Kind -> its class in transformers, and what it has beside SIZES.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-biased-tied": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {}),
}


def save_model(kind: str, place: Path) -> Any:
    """Writes the directory; the model that is in it, in float32. The same at every call."""
    import transformers

    name, more = CONFIGS[kind]
    config = getattr(transformers, name)(**SIZES, **more)
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        # Freshly made biases are zero and norms one: both would hide that they are not applied.
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(place)
    save_tokenizer(place)
    return model
