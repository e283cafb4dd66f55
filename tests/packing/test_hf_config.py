"""What from_hf reads out of Hugging Face configs of both generations."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvtier.errors import LayoutError
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment, Shard

LLAMA = {
    "_name_or_path": "maker/llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 10000,
}
DEEPSEEK = {
    **LLAMA,
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
COMMON = {"revision": "r1", "page_tokens": 16, "dtype": "bfloat16"}


def read(config, **changes) -> Layout:
    return Layout.from_hf(config, **{**COMMON, **changes})


def test_llama_style():
    page = read(LLAMA)
    assert page.model_id == "maker/llama"
    assert page.weights_revision == "r1"
    assert page.kv_compute == "bfloat16"
    assert page.rope == '{"rope_theta":10000.0,"rope_type":"default"}'
    assert page.segments == tuple(
        Segment(
            name=name,
            role=role,
            dtype="bfloat16",
            layers=4,
            heads=2,
            dim=8,
            scale_rule=ScaleRule.LAYER_HEAD,
        )
        for name, role in (("k", Role.KEY), ("v", Role.VALUE))
    )
    assert page.shard == Shard(layers=(0, 4), heads=(0, 2))


def test_object_and_dict_agree():
    assert read(SimpleNamespace(**LLAMA)) == read(LLAMA)


def test_head_dim_wins_over_the_quotient():
    assert [s.dim for s in read({**LLAMA, "head_dim": 128}).segments] == [128, 128]
    assert [s.dim for s in read({**LLAMA, "head_dim": None}).segments] == [8, 8]


def test_without_kv_heads_every_head_has_its_own():
    config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert read(config).model_heads == 8


def test_deepseek_style():
    page = read(DEEPSEEK)
    latent, rope = page.segments
    assert (latent.role, latent.heads, latent.dim) == (Role.LATENT, 1, 32)
    assert (rope.role, rope.heads, rope.dim) == (Role.ROPE, 1, 16)
    assert (latent.scale_rule, rope.scale_rule) == (ScaleRule.LAYER_HEAD, ScaleRule.NONE)
    same = Layout.mla(
        model_id="maker/llama",
        layers=4,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        rope=page.rope,
        **COMMON,
    )
    assert same == page


def test_multimodal_configs_hold_the_model_inside():
    inner = {k: v for k, v in LLAMA.items() if k != "_name_or_path"}
    assert read({"_name_or_path": "maker/llama", "text_config": inner}) == read(LLAMA)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float8_e4m3fn", "torch.float16"])
def test_dtype_by_name(dtype):
    page = read(LLAMA, dtype=dtype)
    name = dtype.removeprefix("torch.")
    assert page.kv_compute == name
    assert {s.dtype for s in page.segments} == {name}
    assert (page.fp8_bytes > 0) == (name != "float8_e4m3fn")


def test_dtype_of_numpy_and_torch():
    torch = pytest.importorskip("torch")
    assert read(LLAMA, dtype=torch.bfloat16) == read(LLAMA)
    assert read(LLAMA, dtype=np.dtype("float32")) == read(LLAMA, dtype="float32")
    with pytest.raises(LayoutError, match="float64"):
        read(LLAMA, dtype=torch.float64)


def test_kv_compute_and_options_pass_through():
    page = read(
        LLAMA,
        kv_compute="float8_e4m3fn",
        adapter_id="a",
        adapter_revision="1",
        storage_order="LHTD",
        key_scheme="own",
        model_id="mine",
        shard_count=2,
        shard=Shard(index=1, layers=(0, 4), heads=(1, 2)),
    )
    assert (page.kv_compute, page.adapter_id, page.storage_order) == ("float8_e4m3fn", "a", "LHTD")
    assert (page.key_scheme, page.model_id, page.shard.index) == ("own", "mine", 1)


YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}),
        ({"rope_theta": 1e4, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 1e4}}),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN},
            {"rope_parameters": {**YARN, "rope_theta": 1e6}},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 1000000}},
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ),
        (
            {"rope_theta": 1e4},
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        ),
    ],
)
def test_both_generations_of_rope_settings_give_the_same_text(old, new):
    bare = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    assert read({**bare, **old}).rope == read({**bare, **new}).rope != ""


def test_every_rope_setting_is_another_family():
    bare = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    settings = [
        {},
        {"rope_theta": 1e4},
        {"rope_theta": 1e5},
        {"rope_theta": 1e4, "rope_scaling": YARN},
        {"rope_theta": 1e4, "rope_scaling": {**YARN, "factor": 8}},
        {"rope_theta": 1e4, "rope_scaling": YARN, "max_position_embeddings": 4096},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
    ]
    texts = [read({**bare, **one}).rope for one in settings]
    assert texts[0] == ""
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": [2, 4]}, "num_key_value_heads is [2, 4]"),
        ({"hidden_size": 65}, "hidden_size 65"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"index_head_dim": 128}, "index_head_dim is 128"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
        ({"_name_or_path": ""}, "model_id is empty"),
        ({"rope_scaling": "yarn"}, "rope settings are 'yarn'"),
        ({"rope_scaling": {"factor": object}}, "rope setting"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_by_name(change, named):
    with pytest.raises(LayoutError) as caught:
        read({**LLAMA, **change})
    assert named in str(caught.value)


@pytest.mark.parametrize("kind", ["sliding_attention", "chunked_attention", "full_attention"])
def test_attention_kinds_with_a_full_cache_are_read(kind):
    assert read({**LLAMA, "layer_types": [kind] * 4}) == read(LLAMA)


def test_real_config_objects():
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaConfig(
        name_or_path="maker/llama",
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        hidden_size=64,
        rope_theta=10000.0,
    )
    assert read(llama) == read(LLAMA)
    assert read(llama.to_dict()) == read(LLAMA)
    deepseek = transformers.DeepseekV3Config(
        name_or_path="maker/llama",
        num_hidden_layers=4,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        rope_theta=10000.0,
    )
    assert read(deepseek) == read(DEEPSEEK)
    qwen = transformers.Qwen2Config(
        name_or_path="maker/llama",
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        hidden_size=64,
        rope_theta=10000.0,
    )
    assert read(qwen) == read(LLAMA)
