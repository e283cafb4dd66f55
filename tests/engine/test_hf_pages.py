"""A transformers cache becomes pages and a cache again without the change of a bit."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvtier
from kvtier_engine.causal_lm import CausalLM
from kvtier_engine.errors import ModelUnusable
from kvtier_engine.hf_pages import cache_from_pages, pages_from_cache

PAGE_TOKENS = 8
IDS = [(7 * i + 3) % 96 for i in range(45)]


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    torch.manual_seed(11)
    return CausalLM.of(LlamaForCausalLM(tiny_config()).to(torch.bfloat16).eval())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def random_cache(*, tokens: int, batch: int = 1, seed: int = 5) -> DynamicCache:
    """Random bit patterns, so that every bfloat16 (NaNs and infinities too) takes part."""
    generator = torch.Generator().manual_seed(seed)
    cache = DynamicCache()
    for layer in range(3):
        parts = torch.randint(-(2**15), 2**15, (2, batch, 2, tokens, 8), generator=generator)
        keys, values = parts.to(torch.int16).view(torch.bfloat16)
        cache.update(keys, values, layer)
    return cache


@pytest.mark.parametrize("tokens", [8, 16, 40])
def test_round_trip_of_full_pages_is_exact(tokens: int) -> None:
    cache = random_cache(tokens=tokens)
    back = cache_from_pages(pages_from_cache(cache, page_tokens=PAGE_TOKENS))
    for before, after in zip(cache.layers, back.layers, strict=True):
        assert torch.equal(bits(before.keys), bits(after.keys))
        assert torch.equal(bits(before.values), bits(after.values))


def test_a_number_lies_where_the_layout_says() -> None:
    cache = random_cache(tokens=19)
    pages = pages_from_cache(cache, page_tokens=PAGE_TOKENS)
    assert pages.shape == (2, 2, 3, PAGE_TOKENS, 2, 8)
    layer, token, head = 2, 11, 1
    for part, whole in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
        stored = pages[token // PAGE_TOKENS, part, layer, token % PAGE_TOKENS, head]
        assert torch.equal(bits(stored), bits(whole[0, head, token]))


def test_a_page_has_the_bytes_of_the_layout_of_its_config() -> None:
    layout = kvtier.Layout.from_hf(
        tiny_config(), revision="r", page_tokens=PAGE_TOKENS, dtype=torch.bfloat16, model_id="tiny"
    )
    pages = pages_from_cache(random_cache(tokens=19), page_tokens=PAGE_TOKENS)
    assert pages[0].nbytes == layout.raw_bytes
    spans = layout.spans(kvtier.Codec.RAW)
    assert [span.offset for span in spans] == [0, pages[0, 0].nbytes]
    assert [tuple(span.shape) for span in spans] == [tuple(pages.shape[2:])] * 2


def test_only_full_pages_and_only_those_asked_for() -> None:
    cache = random_cache(tokens=30)
    every = pages_from_cache(cache, page_tokens=PAGE_TOKENS)
    assert len(every) == 3
    assert torch.equal(
        bits(pages_from_cache(cache, page_tokens=PAGE_TOKENS, first=2)), bits(every[2:])
    )
    assert len(pages_from_cache(cache, page_tokens=PAGE_TOKENS, first=9)) == 0
    assert cache_from_pages(every[:0]).get_seq_length() == 0


def test_a_batch_is_refused() -> None:
    with pytest.raises(ModelUnusable, match="one sequence") as raised:
        pages_from_cache(random_cache(tokens=16, batch=2), page_tokens=PAGE_TOKENS)
    assert "batch of one" in raised.value.remedy


@pytest.mark.parametrize("hit_pages", range(6))
def test_going_on_from_any_prefix_gives_the_same_bits(lm: CausalLM, hit_pages: int) -> None:
    whole = DynamicCache()
    expected = lm.prefill(IDS, whole, page_tokens=PAGE_TOKENS)
    pages = pages_from_cache(whole, page_tokens=PAGE_TOKENS)

    cache = cache_from_pages(pages[:hit_pages].clone())
    logits = lm.prefill(IDS, cache, page_tokens=PAGE_TOKENS)

    assert torch.equal(bits(logits), bits(expected))
    assert torch.equal(bits(pages_from_cache(cache, page_tokens=PAGE_TOKENS)), bits(pages))
    ours = lm.decode(logits, cache, tokens=12)
    theirs = lm.decode(expected, whole, tokens=12)
    assert ours.ids == theirs.ids
    assert torch.equal(bits(ours.logits), bits(theirs.logits))
