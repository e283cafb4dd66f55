"""Products of a CPU: the numbers of the plain way, whichever way the number of rows picks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kvtier_engine.model import products
from kvtier_engine.model.products import lying_well, product
from tests.engine.engine_rig import tiny_model

ROWS = [1, 2, 7, 8, 9, 64]
INPUTS, OUTPUTS = 96, 600


def case(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(rows)
    return (
        torch.randn(rows, INPUTS, generator=made).to(dtype),
        torch.randn(OUTPUTS, INPUTS, generator=made).to(dtype),
        torch.randn(OUTPUTS, generator=made).to(dtype),
    )


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("is_wide", [True, False], ids=["widened", "own"])
def test_bfloat16_is_summed_in_float32_and_rounded_once(
    monkeypatch: pytest.MonkeyPatch, rows: int, has_bias: bool, is_wide: bool
) -> None:
    monkeypatch.setattr(products, "_has_bfloat16", lambda: not is_wide)
    # Three parts to each side, the last of them smaller.
    monkeypatch.setattr(products, "_WIDE_OUTPUTS", 256)
    monkeypatch.setattr(products, "_WIDE_NUMBERS", 256 * 40)
    some, matrix, added = case(rows, torch.bfloat16)
    bias = added if has_bias else None
    made = product(some, lying_well(matrix), bias)
    exact = some.double() @ matrix.double().t() + (added.double() if has_bias else 0.0)
    assert made.dtype is torch.bfloat16
    # Half a unit of the last place, and what sums in float32 lose before it.
    torch.testing.assert_close(made.double(), exact, rtol=2**-8 + 1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", ROWS)
def test_float32_is_the_plain_product(rows: int) -> None:
    some, matrix, bias = case(rows, torch.float32)
    made = product(some, lying_well(matrix), bias)
    torch.testing.assert_close(made, functional.linear(some, matrix, bias), rtol=1e-5, atol=1e-4)


def test_the_number_of_rows_alone_picks_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    picked: list[int] = []
    monkeypatch.setattr(products, "_has_bfloat16", lambda: False)

    def widened(rows: torch.Tensor, *_: object) -> torch.Tensor:
        picked.append(len(rows))
        return rows

    monkeypatch.setattr(products, "_widened", widened)
    for dtype in (torch.bfloat16, torch.float32):
        for rows in ROWS:
            product(*case(rows, dtype))
    assert picked == [8, 9, 64]


@pytest.mark.parametrize(
    ("can", "has"),
    [({"avx512_bf16": False, "avx2": True}, False), ({"amx_bf16": True}, True), (None, True)],
    ids=["none", "tiles", "unknown"],
)
def test_what_the_processor_can_is_what_torch_says(
    monkeypatch: pytest.MonkeyPatch, can: dict[str, bool] | None, has: bool
) -> None:
    if can is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities")
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
    products._has_bfloat16.cache_clear()
    assert products._has_bfloat16() is has
    products._has_bfloat16.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "has_bfloat16", "is_by_column"),
    [
        (torch.float32, True, True),
        (torch.float32, False, True),
        (torch.bfloat16, False, True),
        (torch.bfloat16, True, False),
    ],
    ids=["fp32", "fp32-without", "bf16-without", "bf16"],
)
def test_every_matrix_of_a_network_lies_well(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_bfloat16: bool, is_by_column: bool
) -> None:
    monkeypatch.setattr(products, "_has_bfloat16", lambda: has_bfloat16)
    weights = tiny_model(dtype).network.weights
    layer = weights.layers[0]
    inside = (layer.qkv, layer.output, layer.gate_up, layer.down)
    for matrix in (*inside, weights.embedding, weights.head):
        outputs, inputs = matrix.shape
        assert matrix.stride() == ((1, outputs) if is_by_column else (inputs, 1))
