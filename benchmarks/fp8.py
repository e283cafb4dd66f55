"""FP8 packing of pages beside torch's own casts with scales, on one core.

    python -m benchmarks.fp8 [--quick] [--pages 32] [--rounds 9] [--json FILE]

Pages are 2 MiB of bfloat16 (k and v of 8 layers, 64 tokens, 8 heads of 128 numbers), with a scale a
layer and head. kvtier: `kvtier.packing.fp8.pack` and `unpack` by numba, with all their checks.
torch: the same formula in its operations, without checks, in the fastest way found: amax on
bfloat16, then float32 in place, clamp and cast; back a cast to float32, in place, and a cast.

Each side goes through all pages in turn with the other, and who begins changes with the round. The
pages are populated, and freed memory is kept, so neither side pays for page faults. Medians over
the rounds, in GB/s of bfloat16, and of the ratios.

Without numba there is nothing to compare: the benchmark says so and ends with 2.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import in_turn
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Bound, Missing, Row, Target
from kvtier.daemon.process import tune_allocator
from kvtier.packing import fp8
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment

LAYERS, TOKENS, HEADS, DIM = 8, 64, 8, 128
SHAPES = {"LTHD": (2, LAYERS, TOKENS, HEADS, DIM), "LHTD": (2, LAYERS, HEADS, TOKENS, DIM)}
CODE_MAX = 448.0
TARGET = Target(bound=Bound.AT_LEAST, number=8.0)


def layout(order: str) -> Layout:
    segments = [
        Segment(
            name=name,
            role=role,
            dtype="bfloat16",
            layers=LAYERS,
            heads=HEADS,
            dim=DIM,
            scale_rule=ScaleRule.LAYER_HEAD,
        )
        for name, role in (("k", Role.KEY), ("v", Role.VALUE))
    ]
    return Layout.from_segments(
        segments,
        model_id="benchmark",
        revision="1",
        page_tokens=TOKENS,
        kv_compute="bfloat16",
        storage_order=order,
    )


def torch_pack(axes: tuple[int, int], page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    amax = page.abs().amax(axes, keepdim=True).to(torch.float32)
    scale = torch.where(amax == 0, 1.0, (amax / CODE_MAX).clamp_(min=2.0**-126))
    scaled = page.to(torch.float32).mul_(1.0 / scale).clamp_(-CODE_MAX, CODE_MAX)
    return scaled.to(torch.float8_e4m3fn), scale


def torch_unpack(packed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    codes, scale = packed
    return codes.to(torch.float32).mul_(scale).to(torch.bfloat16)


def rate(step: Callable[[object], object], pages: list[object], nbytes: int) -> float:
    started = time.perf_counter()
    for page in pages:
        step(page)
    return nbytes / (time.perf_counter() - started) / 1e9


def rows_of(plan: Plan, order: str, count: int) -> Iterator[Measured]:
    page_layout, shape = layout(order), SHAPES[order]
    generator = torch.Generator().manual_seed(plan.seed)
    tensors = [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(count)]
    raws: list[NDArray[np.uint8]] = [page.view(torch.uint8).numpy().reshape(-1) for page in tensors]
    packed = [fp8.pack(page_layout, raw) for raw in raws]
    axes = (1 + order.index("T"), 4)
    ours = torch.from_numpy(packed[0][: tensors[0].numel()]).view(torch.float8_e4m3fn)
    theirs = torch_pack(axes, tensors[0])[0].reshape(-1)
    if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
        raise SystemExit("the two sides do not compute the same")
    nbytes = count * page_layout.raw_bytes
    steps = {
        "pack": (partial(fp8.pack, page_layout), raws, partial(torch_pack, axes), tensors),
        "unpack": (
            partial(fp8.unpack, page_layout),
            packed,
            torch_unpack,
            [torch_pack(axes, page) for page in tensors],
        ),
    }
    for name, (step, pages, torch_step, torch_pages) in steps.items():
        progress(f"fp8/{name}-{order}")
        yield Row.of_pairs(
            f"fp8/{name}-{order}",
            f"FP8 {name}, 2 MiB pages, {order}, one core",
            in_turn(
                lambda _, a=step, b=pages: rate(a, b, nbytes),
                lambda _, a=torch_step, b=torch_pages: rate(a, b, nbytes),
                plan.rounds(9),
            ),
            "GB/s of bf16",
            "the same formula in torch",
            target=TARGET,
        )


def rows(plan: Plan, pages: int | None = None) -> Iterator[Measured]:
    torch.set_num_threads(1)
    tune_allocator()
    if fp8.warm_up() is not fp8.Fp8Backend.NUMBA:
        yield Missing(name="fp8", reason="numba is not installed: pip install 'kvtier[fast]'")
        return
    for order in SHAPES:
        yield from rows_of(plan, order, pages or plan.sized(32, 4))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--pages", type=int)
    arguments = parser.parse_args()
    return finish(
        "FP8 beside torch, one core",
        lambda: rows(Plan.of(arguments), arguments.pages),
        arguments,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
