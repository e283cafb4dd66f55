"""The calls of SGLang's storage threads: 128 pages got or set in one, beside memcpy and SGLang's
own file backend.

    python -m benchmarks.sglang_calls [--quick] [--rounds 5] [--dir DIR] [--json FILE]

kvtier: what `KvTierHiCacheStorage` does in batch_get_v1 and batch_set_v1 with a host pool of layout
page_first_direct, from slots to booleans, K and V of a page by themselves. Set is of new keys into
an arena with room, which are deleted after the round, outside the time. memcpy: memmove of the same
pieces between two pools, in the same order. HiCacheFile: its batch_get and batch_set with flat
pages that are there already, of files that lie in the page cache; SGLang copies each page once more
there, which is not counted. It is loaded from the environment of `make sglang-env`, without the
rest of SGLang. Lookup is of as many keys as a prompt of a million tokens has pages of 64.

Ratios are of one round; the table has their median, the lowest and the highest.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

import kvtier
from benchmarks.common import attach, daemon, in_turn, wait_populated
from benchmarks.local import came_by, grown
from benchmarks.local_put import went_by
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Bound, Missing, Of, Row, Target
from kvtier.client import Connection
from kvtier_sglang.layouts import Identity, Ranks, part_layouts
from kvtier_sglang.options import Options
from kvtier_sglang.pools import page_places, rows_of, shape_of
from kvtier_sglang.store import PageStore

__all__ = ["SHAPES", "Calls", "Shape", "lookup", "measure", "rows"]

PAGES, QUICK_PAGES = 128, 8
LOOKED_UP = 16_384
PAGE_TOKENS = 64
#: Of the usual size or more: a client is granted 2 % of the arena ahead, which in a small one is
#: less than a slice. Beside the pages of a round those of the one before are still being freed.
ARENA_BYTES, QUICK_ARENA_BYTES = 4 << 30, 768 << 20
ARENA_OF_PAGES = 2.5
COPY_TARGET = Target(bound=Bound.AT_LEAST, number=0.7)
FILE_TARGET = Target(bound=Bound.AT_LEAST, number=3.0)
EXISTS_TARGET = Target(bound=Bound.AT_MOST, number=5.0, of=Of.VALUE)
ENVIRONMENT = Path(__file__).resolve().parent.parent / ".sglang-env"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A page of a model on one rank. `heads` 0 is latent attention with rows of `dim` numbers."""

    name: str
    model: str
    layers: int
    heads: int
    dim: int

    @property
    def page_bytes(self) -> int:
        return self.layers * PAGE_TOKENS * self.dim * 2 * (2 * self.heads or 1)

    def pool(self, pages: int) -> Any:
        """A host pool as SGLang has it, as far as the binding looks at it. Its memory is there."""
        form = (pages, self.layers, PAGE_TOKENS, self.heads or 1, self.dim)
        buffer = torch.ones((2, *form) if self.heads else form, dtype=torch.bfloat16)
        heads = {"head_num": self.heads, "head_dim": self.dim, "v_head_dim": self.dim}
        return SimpleNamespace(
            layout="page_first_direct",
            page_size=PAGE_TOKENS,
            page_num=pages,
            layer_num=self.layers,
            start_layer=0,
            dtype=torch.bfloat16,
            kv_buffer=buffer,
            **(heads if self.heads else {"kv_cache_dim": self.dim}),
        )


SHAPES = (
    Shape(name="2MiB", model="Llama-3-8B, TP 4", layers=32, heads=2, dim=128),
    Shape(name="4.3MiB", model="DeepSeek-V3, latent", layers=61, heads=0, dim=576),
    Shape(name="8MiB", model="Llama-3-8B, TP 1", layers=32, heads=8, dim=128),
)


class Calls:
    """Two host pools of one shape, `source` full of numbers, and a store for each."""

    def __init__(self, kv: Connection, shape: Shape, pages: int, seed: int) -> None:
        self.kv = kv
        self.shape = shape
        self.pages = pages
        self.gigabytes = pages * shape.page_bytes / 1e9
        self._draw = random.Random(seed)
        self.source, self.target, self._copied = (shape.pool(pages) for _ in range(3))
        numbers = self.source.kv_buffer.view(torch.int16)
        numbers.random_(-(2**15), 2**15, generator=torch.Generator().manual_seed(seed))
        self._stores = [_store(kv, pool) for pool in (self.source, self.target)]
        #: What others have stored there.
        self._used_before = self._used()

    def order(self) -> list[int]:
        return self._draw.sample(range(self.pages), self.pages)

    def new_keys(self) -> list[str]:
        return [self._draw.randbytes(32).hex() for _ in range(self.pages)]

    def set(self, keys: list[str], order: list[int]) -> float:
        """Seconds."""
        return self._timed(self._stores[0].set, self.source, keys, order)

    def get(self, keys: list[str], order: list[int]) -> float:
        """Seconds."""
        return self._timed(self._stores[1].get, self.target, keys, order)

    def forget(self) -> None:
        """Deletes all pages, and waits until their memory is free."""
        self._stores[0].clear()
        until = time.monotonic() + 30
        while self._used() > self._used_before:
            assert time.monotonic() < until, "deleted pages are not freed"
            time.sleep(0.01)

    def _used(self) -> int:
        return sum(tier.used_bytes for tier in self.kv.status().tiers)

    def wait_found(self, keys: list[str]) -> None:
        """Until the one that gets has noticed the last deletion."""
        until = time.monotonic() + 10
        while self._stores[1].exists(keys) < len(keys):
            assert time.monotonic() < until
            time.sleep(0.02)

    def memmove(self, order: list[int]) -> float:
        """Seconds."""
        pieces = _pieces(self.source.kv_buffer, self._copied.kv_buffer, self.shape, order)
        move = ctypes.memmove
        began = time.perf_counter()
        for target, source, nbytes in pieces:
            move(target, source, nbytes)
        return time.perf_counter() - began

    def check(self, stored_from: list[int], got_to: list[int]) -> None:
        """What was got is what was set, for some pages of it."""
        source, target = (_paged(pool, self.shape) for pool in (self.source, self.target))
        for number in range(0, self.pages, max(1, self.pages // 4)):
            page = source[stored_from[number]].view(torch.int16)
            assert torch.equal(page, target[got_to[number]].view(torch.int16)), f"page {number}"

    def _timed(
        self, call: Callable[..., list[bool]], pool: Any, keys: list[str], order: list[int]
    ) -> float:
        slots = torch.cat(
            [torch.arange(at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS) for at in order]
        )  # fmt: skip
        began = time.perf_counter()
        found = call(keys, page_places(slots, pool.page_size, len(keys)))
        took = time.perf_counter() - began
        assert all(found), f"{sum(found)} of {len(keys)} pages"
        return took


def _store(kv: Connection, pool: Any) -> PageStore:
    shape = shape_of(pool)
    identity = Identity(model_id="bench", weights_revision="1", kv_format="bfloat16")
    # The most that may be given: what is measured is how long it takes.
    options = Options(exists_deadline=5.0, get_deadline=5.0, set_deadline=5.0)
    return PageStore(kv, part_layouts(shape, identity, Ranks()), rows_of(pool, shape), options)


def _paged(pool: Any, shape: Shape) -> torch.Tensor:
    """(pages, ...) of the pool."""
    buffer: torch.Tensor = pool.kv_buffer
    return buffer.transpose(0, 1) if shape.heads else buffer


def _pieces(
    source: torch.Tensor, target: torch.Tensor, shape: Shape, order: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(to, from, bytes): K and V of a page, or its one row."""
    parts = 2 if shape.heads else 1
    nbytes = shape.page_bytes // parts
    places = [part * source.nbytes // parts + page * nbytes
              for page in order for part in range(parts)]  # fmt: skip
    return [(target.data_ptr() + at, source.data_ptr() + at, nbytes) for at in places]


class Files:
    """SGLang's HiCacheFile in a folder of its own, and a flat page of memory for each key."""

    def __init__(self, folder: Path, shape: Shape, pages: int) -> None:
        storage = _hicache_storage()
        config = storage.HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=not shape.heads, enable_storage_metrics=False,
            is_page_first_layout=False, model_name="bench",
            extra_config={"file_storage_path": str(folder)},
        )  # fmt: skip
        self._backend = storage.HiCacheFile(config)
        self._folder = folder
        self._flat = [torch.ones(shape.page_bytes // 2, dtype=torch.bfloat16) for _ in range(pages)]

    def set(self, keys: list[str]) -> float:
        """Seconds."""
        began = time.perf_counter()
        is_set = self._backend.batch_set(keys, self._flat)
        took = time.perf_counter() - began
        assert is_set
        return took

    def get(self, keys: list[str]) -> float:
        """Seconds."""
        began = time.perf_counter()
        found = self._backend.batch_get(keys, self._flat)
        took = time.perf_counter() - began
        assert all(page is not None for page in found)
        return took

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            (self._folder / f"{key}{self._backend.config_suffix}.bin").unlink()


class Sides:
    """What is measured in turn, in GB/s of a round. Orders are the same for both."""

    def __init__(self, calls: Calls, files: Files | None, rounds: int) -> None:
        self._calls = calls
        self._files = files
        self._orders = [calls.order() for _ in range(rounds + 1)]
        self._keys = calls.new_keys()

    def store(self) -> None:
        """Puts what the gets ask for in its place, on both sides."""
        self._calls.set(self._keys, self._orders[0])
        self._calls.wait_found(self._keys)
        if self._files is not None:
            self._files.set(self._keys)

    def set(self, number: int) -> float:
        took = self._calls.set(self._calls.new_keys(), self._orders[number])
        self._calls.forget()
        return self._calls.gigabytes / took

    def get(self, number: int) -> float:
        # What is at a place of the pool now was stored from the place of the same key.
        took = self._calls.get(self._keys, self._orders[number])
        self._calls.check(self._orders[0], self._orders[number])
        return self._calls.gigabytes / took

    def memmove(self, number: int) -> float:
        return self._calls.gigabytes / self._calls.memmove(self._orders[number])

    def file_set(self, number: int) -> float:
        assert self._files is not None
        keys = self._calls.new_keys()
        took = self._files.set(keys)
        self._files.forget(keys)
        return self._calls.gigabytes / took

    def file_get(self, number: int) -> float:
        assert self._files is not None
        return self._calls.gigabytes / self._files.get(self._keys)


def _hicache_storage() -> ModuleType:
    """The module that has HiCacheFile. Of the rest of SGLang, which needs a hundred packages, there
    is one function that says numbers in its log.
    """
    package = next(ENVIRONMENT.glob("lib/python3*/site-packages/sglang"))
    for name, places in (
        ("sglang", [str(package)]),
        ("sglang.srt.utils", []),
        ("sglang.srt.utils.common", []),
    ):
        bare: Any = ModuleType(name)
        bare.__path__ = places
        bare.human_readable_int = str
        sys.modules[name] = bare
    return import_module("sglang.srt.mem_cache.hicache_storage")


def measure(plan: Plan, calls: Calls, files: Files | None, kernels: str) -> Iterator[Measured]:
    """Set and get of one shape, each beside both references."""
    rounds, kv = plan.rounds(5), calls.kv
    sides = Sides(calls, files, rounds)
    what = f"{calls.pages} pages of {calls.shape.name} ({calls.shape.model}) in a call"
    for verb, ours, of_file in (
        ("set", sides.set, sides.file_set),
        ("get", sides.get, sides.file_get),
    ):
        references = [("memcpy", "memmove of the same pieces", sides.memmove, COPY_TARGET)]
        if files is not None:
            references.append(("file", f"HiCacheFile, batch_{verb}", of_file, FILE_TARGET))
        if verb == "get":
            sides.store()
        for short, reference, theirs, target in references:
            name = f"sglang/{verb}-{calls.shape.name}-{short}"
            if not plan.wants(name):
                continue
            progress(name)
            before = kv.local
            pairs = in_turn(ours, theirs, rounds)
            state = kv.local
            if verb == "get":
                note = came_by(grown(before.counts, state.counts), kernels)
            else:
                stored = (rounds + 1) * calls.pages * (2 if calls.shape.heads else 1)
                note = went_by(grown(before.puts, state.puts), stored, state.not_writing)
            yield Row.of_pairs(
                name, f"{verb}, {what}", pairs, "GB/s", reference, target=target, note=note
            )


def lookup(plan: Plan, kv: Connection) -> Row:
    """A prompt of a million tokens, of which every page is there."""
    shape = Shape(name="tiny", model="", layers=1, heads=1, dim=16)
    count = plan.sized(LOOKED_UP, 512)
    pool = shape.pool(count)
    store = _store(kv, pool)
    keys = [random.Random(plan.seed + number).randbytes(32).hex() for number in range(count)]
    for at in range(0, count, PAGES):
        assert all(store.set(keys[at : at + PAGES], range(at, min(at + PAGES, count))))
    took = []
    for _ in range(plan.rounds(9) + 1):
        began = time.perf_counter()
        found = store.exists(keys)
        took.append((time.perf_counter() - began) * 1e3)
        assert found == count
    return Row.of_values(
        f"sglang/exists-{count}",
        f"exists of {count:,} keys that are there, K and V",
        took[1:],
        "ms",
        target=EXISTS_TARGET,
    )


def rows(plan: Plan) -> Iterator[Measured]:
    has_files = (ENVIRONMENT / ".installed").exists()
    if not has_files:
        yield Missing(name="sglang/*-file", reason="no SGLang: make sglang-env")
    pages = plan.sized(PAGES, QUICK_PAGES)
    for shape in SHAPES:
        if not any(plan.wants_some(f"sglang/{verb}-{shape.name}") for verb in ("get", "set")):
            continue
        room = int(ARENA_OF_PAGES * pages * shape.page_bytes)
        arena_bytes = max(room, plan.sized(ARENA_BYTES, QUICK_ARENA_BYTES))
        with (
            daemon(f"host.bytes={arena_bytes}") as (url, _, _),
            kvtier.connect(url, deadline=60) as kv,
            tempfile.TemporaryDirectory(prefix="kvt-", dir=plan.directory) as folder,
        ):
            calls = Calls(kv, shape, pages, plan.seed)
            kernels = attach(kv)
            wait_populated(kv, arena_bytes)
            files = Files(Path(folder), shape, pages) if has_files else None
            yield from measure(plan, calls, files, kernels)
    if plan.wants_some("sglang/exists"):
        progress("sglang/exists")
        with (
            daemon("host.bytes=512MiB") as (url, _, _),
            kvtier.connect(url, deadline=60) as kv,
        ):
            yield lookup(plan, kv)


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("SGLang's storage calls", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
