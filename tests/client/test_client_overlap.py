"""Pages of `out` that share memory are refused; pages that only interleave are not."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
import torch

import kvtier
from kvtier.client.overlap import Footprint, shares_memory
from tests.seeds import seeds

SIZE = 1024  # bytes of a page


def twice():
    page = bytearray(SIZE)
    return [page, page]


def slices():
    flat = memoryview(bytearray(2 * SIZE))
    return [flat[:SIZE], flat[SIZE - 1 : 2 * SIZE - 1]]


def overlapping_rows():
    return np.lib.stride_tricks.as_strided(np.zeros(SIZE * 3 // 2, np.uint8), (2, SIZE), (512, 1))


def one_page_over_itself():
    page = np.lib.stride_tricks.as_strided(np.zeros(SIZE, np.uint8), (2, 512), (256, 1))
    return [page, np.zeros(SIZE, np.uint8)]


def tensor_and_its_array():
    tensor = torch.zeros(SIZE, dtype=torch.uint8)
    return [tensor, tensor.numpy()]


def backwards():
    flat = np.zeros(SIZE + 1, np.uint8)
    return [flat[:SIZE], flat[::-1][:SIZE]]


def interleaved_with_one_in_common():
    pool = np.zeros((4, 8, SIZE // 4), np.uint8)
    return [pool[:, 3], pool[:, 3]]


def shifted_interleaved():
    pool = np.zeros((4, 8, SIZE // 4), np.uint8).reshape(4, -1)
    return [pool[:, 256:512], pool[:, 511:767]]


@pytest.mark.parametrize(
    "make",
    [
        twice,
        slices,
        overlapping_rows,
        one_page_over_itself,
        tensor_and_its_array,
        backwards,
        interleaved_with_one_in_common,
        shifted_interleaved,
        lambda: torch.zeros(SIZE, dtype=torch.uint8).expand(2, SIZE),
        lambda: torch.zeros(SIZE * 2, dtype=torch.uint8).as_strided((2, SIZE), (512, 1)),
        lambda: [torch.zeros(1, dtype=torch.uint8).expand(SIZE), bytearray(SIZE)],
    ],
)
def test_pages_that_share_memory_are_refused(ns, daemon, make_pages, make):
    keys = ns.keys(range(8))
    ns.put(keys, make_pages(2))
    with pytest.raises(kvtier.PageSizeError, match="share memory") as caught:
        ns.get(keys, out=make())
    assert caught.value.remedy
    assert daemon.calls["get"] == 0


def test_places_of_a_pool_whose_rows_overlap(ns, make_pages):
    """Not the rows that are asked for: those may."""
    keys = ns.keys(range(8))
    pages = make_pages(2)
    ns.put(keys, pages)
    flat = np.zeros(SIZE * 4, np.uint8)
    pool = np.lib.stride_tricks.as_strided(flat, (6, SIZE), (512, 1))
    with pytest.raises(kvtier.PageSizeError, match="share memory"):
        ns.get(keys, out=pool, at=[0, 1])
    assert ns.get(keys, out=pool, at=[3, 0]).hits == 2
    assert [pool[3].tobytes(), pool[0].tobytes()] == pages


def layers_first_tensor():
    pool = torch.zeros((4, 8, SIZE // 4), dtype=torch.uint8)
    return [pool[:, 6], pool[:, 1]]


def layers_first_array():
    pool = np.zeros((4, 8, SIZE // 4), np.uint8)
    return [pool[:, 6], pool[:, 1]]


def number_by_number():
    pool = np.zeros((SIZE, 3), np.uint8)
    return [pool[:, 2], pool[:, 0]]


def blocks_of_different_shape():
    pool = np.zeros((4, 2, 256), np.uint8)
    rest = pool[:, 1]
    return [pool[:, 0], rest.reshape(4, 16, 16)]


@pytest.mark.parametrize(
    "make",
    [
        layers_first_tensor,
        layers_first_array,
        number_by_number,
        blocks_of_different_shape,
        lambda: np.zeros((SIZE, 2), np.uint8).T,
        lambda: np.zeros((2, SIZE), np.uint8)[::-1],
    ],
)
def test_interleaved_pages_are_filled(ns, make_pages, make):
    keys = ns.keys(range(8))
    pages = make_pages(2)
    ns.put(keys, pages)
    out = make()
    assert ns.get(keys, out=out).hits == 2
    assert [bytes(np.ascontiguousarray(page).reshape(-1)) for page in out] == pages


def test_a_put_may_read_the_same_memory_twice(ns, make_pages):
    page = make_pages(1)[0]
    assert ns.put(ns.keys(range(8)), [page, page]).stored == 2


@pytest.mark.parametrize("seed", seeds(40, of=200))
def test_the_answer_is_that_of_every_byte(seed):
    rng = random.Random(seed)
    pages = []
    shape = tuple(rng.randrange(1, 4) for _ in range(rng.randrange(1, 4)))
    strides = tuple(rng.randrange(-24, 25) for _ in shape)
    for _ in range(rng.randrange(1, 5)):
        if rng.random() < 0.2:
            strides = tuple(rng.randrange(-24, 25) for _ in shape)
        pages.append(Footprint(1000 + rng.randrange(80), shape, strides, rng.choice([1, 2])))
    taken = []
    for page in pages:
        spots = [
            page.address + sum(i * s for i, s in zip(index, page.strides, strict=True))
            for index in np.ndindex(*page.shape)
        ]
        taken.append([spot + byte for spot in spots for byte in range(page.itemsize)])
    expected = any(len(set(spots)) < len(spots) for spots in taken) or any(
        set(a) & set(b) for a, b in combinations(taken, 2)
    )
    assert shares_memory(pages) is expected, f"seed {seed}"
