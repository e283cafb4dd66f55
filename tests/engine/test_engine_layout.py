"""Which engines find each other's pages: those that do the same, on whatever threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtier_engine.attention import choice
from kvtier_engine.model.llama import Llama
from kvtier_engine.settings import KvCacheDtype, layout_of
from tests.engine.engine_rig import PAGE_TOKENS, pool_of, tiny_model

CACHES = [
    pytest.param(KvCacheDtype.AS_COMPUTED, "gather", "PlainPages", id="plain"),
    pytest.param(KvCacheDtype.FP8_E4M3, "gather fp8", "Fp8Pages", id="fp8"),
]
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cache", "kernel", "pages"), CACHES)
def test_the_kernel_in_the_name_is_the_one_that_computes(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    cache: KvCacheDtype,
    kernel: str,
    pages: str,
) -> None:
    pool = pool_of(tiny_model(dtype), kv_cache=cache)
    assert f", cpu {kernel}, " in f", {pool.layout.kv_compute}"
    for name in ("PlainPages", "Fp8Pages", "VarlenAttention"):
        if name != pages:
            monkeypatch.delattr(choice, name)
    choice.attention_for(pool, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", [value.values[0] for value in CACHES], ids=["plain", "fp8"])
def test_another_type_of_device_is_another_family(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, cache: KvCacheDtype
) -> None:
    """Also where both gather pages: what runs then are other kernels."""
    model = tiny_model(dtype)
    here = layout_of(model, page_tokens=PAGE_TOKENS, kv_cache=cache)
    monkeypatch.setattr(Llama, "device", torch.device("cuda", 1))
    there = layout_of(model, page_tokens=PAGE_TOKENS, kv_cache=cache)
    assert here.difference(there) is not None
    monkeypatch.setattr(Llama, "device", torch.device("cuda", 0))
    assert layout_of(model, page_tokens=PAGE_TOKENS, kv_cache=cache) == there


def test_replicas_on_another_number_of_threads_share_pages(threads: None) -> None:
    """Last bits may differ then; the words of `layout_of` promise no more."""
    model = tiny_model()
    made = []
    for count in (1, 2):
        torch.set_num_threads(count)
        made.append(layout_of(model, page_tokens=PAGE_TOKENS))
    assert made[0] == made[1]
