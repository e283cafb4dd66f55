"""FP8 packing of pages beside torch's own casts with scales, on one core.

    python -m benchmarks.fp8 [--pages 32] [--rounds 9] [--json FILE]

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

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import median, report
from kvtier.daemon.process import tune_allocator
from kvtier.packing import fp8
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment

LAYERS, TOKENS, HEADS, DIM = 8, 64, 8, 128
SHAPES = {"LTHD": (2, LAYERS, TOKENS, HEADS, DIM), "LHTD": (2, LAYERS, HEADS, TOKENS, DIM)}
CODE_MAX = 448.0
SEED = 8
TO_REACH = 8.0


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


def compare(
    name: str, sides: dict[str, tuple[Callable[[object], object], list[object]]], nbytes: int,
    rounds: int,
) -> dict[str, object]:  # fmt: skip
    """A row of the report; `sides` are kvtier and torch, each with its step and its pages."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            measured = rate(*sides[side], nbytes)
            if number:  # the first warms up
                rates[side].append(measured)
    ratios = [a / b for a, b in zip(rates["kvtier"], rates["torch"], strict=True)]
    return {
        "step": name,
        "kvtier GB/s": median(rates["kvtier"]),
        "torch GB/s": median(rates["torch"]),
        "ratio": median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "to reach": TO_REACH,
        "reached": "yes" if median(ratios) >= TO_REACH else "no",
    }


def rows_of(order: str, count: int, rounds: int) -> list[dict[str, object]]:
    page_layout, shape = layout(order), SHAPES[order]
    generator = torch.Generator().manual_seed(SEED)
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
        "pack": {
            "kvtier": (partial(fp8.pack, page_layout), raws),
            "torch": (partial(torch_pack, axes), tensors),
        },
        "unpack": {
            "kvtier": (partial(fp8.unpack, page_layout), packed),
            "torch": (torch_unpack, [torch_pack(axes, page) for page in tensors]),
        },
    }
    return [
        compare(f"{name}, 2 MiB pages, {order}", sides, nbytes, rounds)
        for name, sides in steps.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    if fp8.warm_up() is not fp8.Fp8Backend.NUMBA:
        sys.stderr.write("numba is not installed: pip install 'kvtier[fast]'\n")
        return 2
    rows = [row for order in SHAPES for row in rows_of(order, arguments.pages, arguments.rounds)]
    report("FP8 beside torch, one core", rows, arguments.json)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
