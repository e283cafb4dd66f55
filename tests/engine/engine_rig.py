"""A tiny random network with a byte tokenizer, and engines over it, for tests that need no text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from kvtier.client.device import DevicePool
from kvtier_engine.engine import Engine
from kvtier_engine.model.config import ModelConfig
from kvtier_engine.model.llama import Llama
from kvtier_engine.model.load import LoadedModel
from kvtier_engine.model.tokens import Tokenizer
from kvtier_engine.model.weights import Weights, shapes_of
from kvtier_engine.schedule.request import Completion, Request, Sampling
from kvtier_engine.settings import EngineSettings, KvCacheDtype, layout_of

PAGE_TOKENS = 8
END = 1
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": END,
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
TOKENIZER = {"chat_template": TEMPLATE, "bos_token": "<s>"}


def raw_tokenizer() -> RawTokenizer:
    """One token a byte, after four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", "<pad>", "<unk>", *alphabet]
    raw = RawTokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(names[:4])
    return raw


def save_tokenizer(place: Path) -> None:
    (place / "tokenizer.json").write_text(raw_tokenizer().to_str(), encoding="utf-8")
    (place / "tokenizer_config.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")


def tiny_model(dtype: torch.dtype = torch.float32, *, seed: int = 7) -> LoadedModel:
    """The same random weights at every call with the same seed."""
    config = ModelConfig.from_hf(CONFIG)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 1.0 + 0.1 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 0.3
        for name, shape in shapes_of(config).items()
    }
    weights = Weights.of(config, tensors, dtype=dtype, device=torch.device("cpu"))
    return LoadedModel(
        name="tiny",
        revision=f"seed-{seed}",
        network=Llama(config, weights),
        tokenizer=Tokenizer(raw_tokenizer(), TOKENIZER),
    )


def pool_of(
    model: LoadedModel,
    pages: int = 64,
    *,
    chunk_pages: int = 1,
    kv_cache: KvCacheDtype = KvCacheDtype.AS_COMPUTED,
) -> DevicePool:
    layout = layout_of(model, page_tokens=PAGE_TOKENS, chunk_pages=chunk_pages, kv_cache=kv_cache)
    return DevicePool(layout, pages)


def engine_of(
    model: LoadedModel,
    *,
    pages: int = 64,
    kv_cache: KvCacheDtype = KvCacheDtype.AS_COMPUTED,
    **settings: object,
) -> Engine:
    made = EngineSettings(**settings)
    pool = pool_of(model, pages, chunk_pages=made.chunk_pages, kv_cache=kv_cache)
    return Engine(model, pool, settings=made)


def prompt_of(tokens: int, *, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(4, 260) for _ in range(tokens))


def greedy(prompt: Sequence[int], tokens: int = 8, **words: object) -> Request:
    """A request that goes on for exactly so many tokens."""
    sampling = Sampling(max_tokens=tokens, ignore_end=True, **words)
    return Request(prompt=tuple(prompt), sampling=sampling)


def answers(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """All at once, stepped in this thread; the engine's accounts must be right afterwards."""
    handles = [engine.submit(request) for request in requests]
    engine.run_until_idle()
    engine.check_idle()
    return [handle.result(0) for handle in handles]


def is_told_without_traceback(caplog: pytest.LogCaptureFixture, event: str, error: str) -> None:
    """An outcome that is known, in lines that name it; nothing crashed."""
    assert [record.exc_info for record in caplog.records if record.exc_info] == []
    told = [record for record in caplog.records if record.msg == event]
    assert told
    assert all(str(record.__dict__["why"]).startswith(f"{error}: ") for record in told)
