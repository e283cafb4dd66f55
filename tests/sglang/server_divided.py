"""A small model that two tensor parallel ranks can divide between them, as SmolLM2 cannot be.
transformers is loaded by the one that makes it, not by whoever collects the tests.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ["divisible_model"]


def divisible_model(words: Path, out: Path, *, seed: int = 0) -> Path:
    """Of random numbers: four heads, and two of keys and values. It has the tokenizer of the model
    `words`, and says nothing that makes sense.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(out)
    for path in words.glob("tokenizer*"):
        os.symlink(path, out / path.name)
    return out
