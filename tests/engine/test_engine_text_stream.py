"""Streamed text: whole characters, whatever tokens the bytes of a character are spread over."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from kvtier_engine.model.tokens import TextStream
from tests.engine.engine_rig import raw_tokenizer
from tests.seeds import seeds

_WORDS = ["\u2581the", "\u2581cat", "s", "\u00e9", "\u4f60"]


def fallback_tokenizer() -> RawTokenizer:
    """As Llama has it: words, and one token a byte for what no word has."""
    names = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    vocabulary = {name: number for number, name in enumerate(names)}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    raw.add_special_tokens(["<s>"])
    return raw


def tokens_for(raw: RawTokenizer, text: str | bytes) -> list[int]:
    data = text.encode() if isinstance(text, str) else text
    return [raw.token_to_id(f"<0x{byte:02X}>") for byte in data]


def streamed(raw: RawTokenizer, tokens: list[int]) -> list[str]:
    stream = TextStream(raw)
    return [stream.add(token) for token in tokens]


@pytest.mark.parametrize("text", ["\u00e9", "\u20ac", "\U0001f600"], ids=["two", "three", "four"])
def test_a_character_comes_with_its_last_byte(text: str) -> None:
    raw = fallback_tokenizer()
    tokens = tokens_for(raw, text)
    assert streamed(raw, tokens) == [""] * (len(tokens) - 1) + [text]


def test_words_and_bytes_in_turn() -> None:
    raw = fallback_tokenizer()
    the, cat, plural = (raw.token_to_id(word) for word in _WORDS[:3])
    tokens = [the, *tokens_for(raw, "\U0001f600"), cat, plural, *tokens_for(raw, "\u20ac")]
    assert streamed(raw, tokens) == [
        " the", "", "", "", "\U0001f600", " cat", "s", "", "", "\u20ac",
    ]  # fmt: skip


def test_bytes_that_are_no_character_hold_back_nothing_that_follows() -> None:
    raw = fallback_tokenizer()
    the = raw.token_to_id(_WORDS[0])
    tokens = [*tokens_for(raw, b"\xe2\x82"), the, *tokens_for(raw, b"\xff"), the]
    assert "".join(streamed(raw, tokens)) == "\ufffd\ufffd the\ufffd the"


def test_what_was_told_is_not_taken_back() -> None:
    """A run of bytes is decoded as one: with a bad one in it the good ones before it are lost."""
    raw = fallback_tokenizer()
    the = raw.token_to_id(_WORDS[0])
    told = tokens_for(raw, "\u00e9")
    bad = tokens_for(raw, b"\xff")
    assert raw.decode(told + bad) == "\ufffd" * 3, "the decoder keeps them: a poor test"
    assert streamed(raw, [*told, *bad, the]) == ["", "\u00e9", "", "\ufffd the"]


class Counting:
    """Notes how many tokens are decoded at a time."""

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        self.longest = 0

    def decode(self, ids: list[int], **words: bool) -> str:
        self.longest = max(self.longest, len(ids))
        return str(self._raw.decode(ids, **words))


@pytest.mark.parametrize(
    ("flood", "text"), [([0], ""), ([1 + 0x80], "\ufffd" * 300)], ids=["special", "no character"]
)
def test_tokens_without_a_text_are_not_decoded_again_and_again(flood: list[int], text: str) -> None:
    raw = fallback_tokenizer()
    the, cat = (raw.token_to_id(word) for word in _WORDS[:2])
    counting = Counting(raw)
    stream = TextStream(counting)  # type: ignore[arg-type]
    said = "".join(stream.add(token) for token in [the, *flood * 300, cat])
    assert said == f" the{text} cat"
    assert counting.longest <= 40


@pytest.mark.parametrize("kind", ["fallback", "byte-level"])
@pytest.mark.parametrize("seed", seeds(5, of=20))
def test_any_text_comes_out_whole(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(
        draw.choice(["the", " ", "\u00e9", "\u4f60\u597d", "\U0001f600", "a\u0301", "\n"])
        for _ in range(40)
    )
    if kind == "fallback":
        raw = fallback_tokenizer()
        tokens = tokens_for(raw, text)
    else:
        raw = raw_tokenizer()
        tokens = raw.encode(text).ids
    assert "".join(streamed(raw, tokens)) == raw.decode(tokens) == text


@pytest.mark.parametrize("seed", seeds(5, of=20))
def test_any_bytes_at_all_end_in_nothing_worse_than_replacement(seed: int) -> None:
    draw, raw = random.Random(seed), fallback_tokenizer()
    tokens = [draw.randrange(raw.get_vocab_size()) for _ in range(200)]
    the = raw.token_to_id(_WORDS[0])
    text = "".join(streamed(raw, [*tokens, the]))
    assert text.endswith(" the")
    # Words among the bytes are all there.
    for word in _WORDS:
        count = tokens.count(raw.token_to_id(word)) + (word == _WORDS[0])
        assert text.count(word.replace("\u2581", " ")) >= count
