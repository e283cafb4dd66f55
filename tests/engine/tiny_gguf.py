"""A two-layer Llama with random weights, as a GGUF file like those llama.cpp's converter writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from gguf import GGUFWriter

from kvtier_engine import smollm2

if TYPE_CHECKING:  # importing it takes seconds
    from transformers import LlamaForCausalLM

ALPHABET = [chr(code) for code in range(ord("a"), ord("z") + 1)]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ALPHABET, "Ġ", "th", "the"]
THEIR_NAME = {ours: theirs for theirs, ours in smollm2._IN_LAYER.items()}


def tiny_model() -> LlamaForCausalLM:
    """The same random weights at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row order of llama.cpp, written as a loop: row 2i is row i, row 2i+1 is row i + half."""
    rows = weight.shape[0] // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for pair in range(rows // 2):
            for side in range(2):
                out[head * rows + 2 * pair + side] = weight[head * rows + side * rows // 2 + pair]
    return out


def gguf_of(model: LlamaForCausalLM, path: Path, *, pre: str = "smollm") -> Path:
    config = model.config
    writer = GGUFWriter(str(path), "llama")
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, value in model.state_dict().items():
        weight = value.float().numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            heads = {"attn_q.weight": 4, "attn_k.weight": 2}.get(THEIR_NAME[rest])
            weight = interleaved(weight, heads) if heads else weight
            writer.add_tensor(f"blk.{layer}.{THEIR_NAME[rest]}", weight)
        elif name != "lm_head.weight":  # tied to the embedding
            outside = {
                "model.embed_tokens.weight": "token_embd",
                "model.norm.weight": "output_norm",
            }
            writer.add_tensor(f"{outside[name]}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
