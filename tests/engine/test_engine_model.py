"""The network against transformers, and what becomes of checkpoints that are not right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtier_engine.errors import InvalidRequest, ModelUnusable
from kvtier_engine.model.load import load_model
from kvtier_engine.model.tokens import Tokenizer
from kvtier_engine.smollm2 import convert
from tests.engine.dense import Dense
from tests.engine.engine_rig import prompt_of, raw_tokenizer
from tests.engine.hf_models import CONFIGS, save_model
from tests.engine.tiny_gguf import gguf_of, tiny_model

KINDS = ["llama", "llama-biased-tied", "llama3-rope", "qwen2", "qwen3"]
PAGE = 16


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Kind -> (directory, the model of transformers in it)."""
    made = {}
    for kind in CONFIGS:
        place = tmp_path_factory.mktemp(kind)
        made[kind] = (place, save_model(kind, place))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    saved: dict[str, tuple[Path, Any]], kind: str
) -> None:
    place, theirs = saved[kind]
    network = load_model(place, dtype=torch.float32).network
    ids = prompt_of(100, seed=1)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
        told = theirs.generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
    dense = Dense(network, pages=8, page_tokens=PAGE)
    torch.testing.assert_close(dense.prefill(ids), expected, rtol=1e-4, atol=1e-4)
    said = Dense(network, pages=8, page_tokens=PAGE).continued(ids, 24)
    assert [token for token, _ in said] == told[0, len(ids) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_within_its_rounding(saved: dict[str, tuple[Path, Any]], kind: str) -> None:
    place, theirs = saved[kind]
    ids = prompt_of(60, seed=2)
    ours = Dense(load_model(place).network, pages=8, page_tokens=PAGE).prefill(ids)
    with torch.inference_mode():
        exact = theirs(torch.tensor([ids])).logits[0]
        rounded = theirs.bfloat16()(torch.tensor([ids])).logits[0].float()
        theirs.float()
    # Two roundings of the same thing: ours may be no further from the exact one than theirs is.
    error = (rounded - exact).pow(2).mean().sqrt()
    assert (ours - exact).pow(2).mean().sqrt() < 1.3 * error


def test_another_architecture_is_named(saved: dict[str, tuple[Path, Any]]) -> None:
    with pytest.raises(ModelUnusable, match="model_type is 'mistral'"):
        load_model(saved["mistral"][0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("layer_types", ["sliding_attention"]),
        ("num_hidden_layers", 0),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1.0}),
        ("rope_parameters", ["default"]),
        ("rope_theta", "ten thousand"),
        ("rms_norm_eps", None),
        ("layer_types", [["full_attention"]]),
        ("eos_token_id", [[1]]),
    ],
)
def test_settings_that_are_not_computed_are_refused(
    saved: dict[str, tuple[Path, Any]], tmp_path: Path, name: str, value: object
) -> None:
    config = json.loads((saved["llama"][0] / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}), encoding="utf-8")
    with pytest.raises(ModelUnusable):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "1 tensors missing, the first is model.layers.1.mlp.up_proj.weight"),
        ("unexpected", "1 tensors unexpected, the first is model.layers.9.odd"),
        ("misshapen", "1 tensors of wrong shape, the first is model.norm.weight"),
        ("torn", "cannot be read"),
        ("none", r"holds no \*.safetensors"),
    ],
)
def test_a_checkpoint_with_wrong_tensors_is_refused(
    saved: dict[str, tuple[Path, Any]], tmp_path: Path, change: str, said: str
) -> None:
    place, _ = saved["llama"]
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((place / name).read_bytes())
    tensors = load_file(place / "model.safetensors")
    if change == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif change == "unexpected":
        tensors["model.layers.9.odd"] = torch.zeros(1)
    elif change == "misshapen":
        tensors["model.norm.weight"] = torch.zeros(3)
    weights = tmp_path / "model.safetensors"
    if change != "none":
        save_file(tensors, weights)
    if change == "torn":
        weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelUnusable, match=said):
        load_model(tmp_path)


def test_a_directory_of_nothing_and_a_broken_tokenizer_are_refused(
    saved: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    with pytest.raises(ModelUnusable, match=r"config\.json cannot be read"):
        load_model(tmp_path)
    for file in saved["llama"][0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name, text in (
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}'),
    ):
        sound = (saved["llama"][0] / name).read_bytes()
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(ModelUnusable, match="tokenizer"):
            load_model(tmp_path)
        (tmp_path / name).write_bytes(sound)


def test_a_template_may_leave_a_loop() -> None:
    """As those of Hugging Face may."""
    inside = "{{ m.content }}{% if m.content == 'b' %}{% break %}{% endif %}"
    template = "{% for m in messages %}" + inside + "{% endfor %}"
    tokenizer = Tokenizer(raw_tokenizer(), {"chat_template": template})
    assert tokenizer.chat([{"role": "user", "content": content} for content in "abc"]) == "ab"


def test_a_gguf_file_is_the_directory_that_it_converts_to(tmp_path: Path) -> None:
    gguf = gguf_of(tiny_model(), tmp_path / "tiny.gguf")
    out = tmp_path / "converted"
    out.mkdir()
    convert(gguf, out)
    straight, converted = load_model(gguf), load_model(out)
    assert straight.revision == converted.revision
    assert straight.tokenizer.encode("the cat<|im_end|>") == converted.tokenizer.encode(
        "the cat<|im_end|>"
    )
    ids = list(range(3, 31))
    logits = [
        Dense(model.network, pages=4, page_tokens=PAGE).prefill(ids)
        for model in (straight, converted)
    ]
    assert torch.equal(*logits)


def test_revisions_tell_weights_apart(saved: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    place, _ = saved["qwen2"]
    for file in place.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    assert load_model(tmp_path).revision == load_model(place).revision
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert load_model(tmp_path).revision != load_model(place).revision


def test_chat_templates(saved: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    tokenizer = load_model(saved["llama"][0]).tokenizer
    text = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert text == "user: hi\nassistant:"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(InvalidRequest, match="does not take these messages"):
        tokenizer.chat([{"content": 1}, 5])  # type: ignore[list-item]


def test_importing_the_engine_loads_neither_transformers_nor_torch_s_compiler() -> None:
    heavy = {"transformers", "torch._dynamo"}
    code = f"import sys, kvtier_engine.engine; print(*{heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
