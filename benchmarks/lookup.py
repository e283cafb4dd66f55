"""Lookups in the directory of the local plane: a million entries, from a list of key bytes.

    python -m benchmarks.lookup [--quick] [--entries 1000000] [--rounds 41] [--json FILE]

The reader's map is its own, read-only and touched before, as in a client that has run for a while.
The work of Python (joining the keys, making the arrays) is in the time. `same` asks the same keys
again and again, as an engine does whose prompts grow; `other` takes other keys every round, at
random places of the whole table, so that every entry comes from memory, which says as much about
the machine as about the table: the rows of random reads are a compiled loop that reads 128 bytes at
as many random places. `whole` has the namespace looked at as well, which is how the client asks for
few keys. A tenth of the keys are not in the table. The owner's cost is that of batches
of 32, encoded ahead.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Bound, Of, Row, Target
from kvtier.core.page import Codec, PageMeta, PageRef, Tier
from kvtier.transfer.local.directory import Directory
from kvtier.transfer.local.entry import encode_entries, encode_entry, identities
from kvtier.transfer.local.loading import load_compiled, load_kernels
from kvtier.transfer.local.lookup import DirectoryView
from kvtier.transfer.local.protocol import ANSWER_KEYS_MAX, Kernels
from kvtier.transfer.local.vectors import NumpyKernels

SEED = 19
BOOT_ID = 23
NAMESPACE, SHARD = 5, 0
BATCH = 32
#: Keys a call -> microseconds to reach.
TO_REACH = {1: 5.0, 1_000: 30.0, 16_000: 1_000.0}


def filled(keys: list[bytes]) -> Directory:
    """A directory with an entry for each key."""
    directory = Directory(
        pages_max=len(keys),
        namespaces_max=64,
        boot_id=BOOT_ID,
        hash_seed=random.Random(SEED).getrandbits(64),
    )
    directory.set_namespace(NAMESPACE, 1)
    for start in range(0, len(keys), 4096):
        directory.put_many(rows_of(keys[start : start + 4096], start + 1))
    return directory


def rows_of(keys: list[bytes], generation: int) -> np.ndarray:
    return encode_entries(
        [
            encode_entry(
                PageRef(BOOT_ID, Tier.HOST, number, number),
                PageMeta(key=key, length=2 << 20, codec=Codec.RAW, payload_sum=key[:16]),
                namespace=NAMESPACE,
                shard=SHARD,
            )
            for number, key in enumerate(keys, generation)
        ]
    )


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


def row_of(name: str, what: str, times: list[float], to_reach: float | None = None) -> Row:
    p95 = sorted(times)[int(0.95 * (len(times) - 1))]
    target = None
    if to_reach is not None:
        target = Target(bound=Bound.AT_MOST, number=to_reach, of=Of.VALUE)
    return Row.of_values(
        f"lookup/{name}", what, times, "us", target=target, note=f"p95 {p95:.3g} us"
    )


def drawn(draw: random.Random, keys: list[bytes], count: int) -> list[bytes]:
    """Keys as a caller has just made them: nine of ten are in the table."""
    asked = draw.sample(keys, count)
    return [bytes(bytearray(key)) if draw.random() < 0.9 else draw.randbytes(32) for key in asked]


def lookups(
    directory: Directory, keys: list[bytes], kernels: Kernels, rounds: int
) -> list[Measured]:
    draw = random.Random(SEED)
    rows: list[Measured] = []
    with DirectoryView(directory.fd, boot_id=BOOT_ID, kernels=kernels) as view:
        view.lookup(keys, namespace=NAMESPACE, shard=SHARD)  # touches every page of the map
        for count, to_reach in TO_REACH.items():
            look = partial(view.lookup, namespace=NAMESPACE, shard=SHARD)
            brief = partial(look, with_entries=False)
            whole = partial(view.answer, namespace=NAMESPACE, shard=SHARD, generation=1)
            asked = drawn(draw, keys, count)
            times: dict[str, list[float]] = {}
            progress(f"lookup/{kernels.name}-{count}")
            for _ in range(rounds * (10 if count == 1 else 1)):
                other = drawn(draw, keys, count)
                times.setdefault("other", []).append(timed(partial(look, other)))
                other = drawn(draw, keys, count)
                times.setdefault("other, without entries", []).append(timed(partial(brief, other)))
            for _ in range(rounds * 4):
                times.setdefault("same", []).append(timed(partial(look, asked)))
                times.setdefault("same, without entries", []).append(timed(partial(brief, asked)))
                if count <= ANSWER_KEYS_MAX:  # as the client does it
                    times.setdefault("whole", []).append(timed(partial(whole, asked)))
            short = {which: which.replace(", without entries", "-brief") for which in times}
            bound = to_reach if kernels.name == "numba" else None
            rows += [
                row_of(
                    f"{kernels.name}-{count}-{short[which]}",
                    f"lookup of {count} by {kernels.name}, keys: {which}",
                    found[1:],
                    bound,
                )
                for which, found in times.items()
            ]
        found = view.lookup(drawn(draw, keys, 1000), namespace=NAMESPACE, shard=SHARD)
        times_ = [timed(partial(view.recheck, found)) for _ in range(4 * rounds)]
        rows.append(row_of(f"{kernels.name}-recheck", "recheck of 1000 entries, the same", times_))
    return rows


def reference(directory: Directory, rounds: int) -> list[Measured]:
    """Reads of 128 bytes at random places of memory as large as the table, compiled."""
    import numba

    @numba.njit  # type: ignore[misc]
    def gather(words, places, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        for i in range(len(places)):
            for word in range(16):
                out[i, word] = words[places[i], word]

    words = np.ones((directory.header.entries, 16), np.uint64)
    draw = np.random.default_rng(SEED)
    rows: list[Measured] = []
    for count in (1_000, 16_000):
        out = np.ones((count, 16), np.uint64)
        times = []
        for _ in range(rounds):
            places = draw.integers(0, len(words), count)
            times.append(timed(partial(gather, words, places, out)))
        what = f"{count} reads of 128 bytes at random places, compiled"
        rows.append(row_of(f"reads-{count}", what, times[1:]))
    return rows


def owner(directory: Directory, rounds: int) -> list[Measured]:
    """Puts of new pages and their removal, so that the load stays."""
    draw = random.Random(SEED + 1)
    puts, removals, encodings = [], [], []
    generation = 1 << 40
    for _ in range(10 * rounds):
        fresh = [draw.randbytes(32) for _ in range(BATCH)]
        generation += BATCH
        encodings.append(timed(partial(rows_of, fresh, generation)) / BATCH)
        rows = rows_of(fresh, generation)
        names = identities(fresh, namespaces=NAMESPACE, shards=SHARD, generations=rows[:, 5])
        puts.append(timed(partial(directory.put_many, rows)) / BATCH)
        removals.append(timed(partial(directory.remove_many, names)) / BATCH)
    return [
        row_of("owner-encode", "owner: encode one entry of 32", encodings),
        row_of("owner-put", f"owner: put one entry of 32 by {directory.kernels}", puts),
        row_of("owner-remove", f"owner: remove one entry of 32 by {directory.kernels}", removals),
    ]


def rows(plan: Plan, entries: int | None = None) -> Iterator[Measured]:
    # Compiling, or loading what was compiled before, is done once a process.
    yield row_of("load", "load the implementation, once a process", [timed(load_kernels)])
    draw = random.Random(SEED)
    # Enough for the largest lookup.
    count = entries or plan.sized(1_000_000, 20_000)
    keys = [draw.randbytes(32) for _ in range(max(count, max(TO_REACH)))]
    rounds = plan.rounds(41)
    with filled(keys) as directory:
        if load_kernels().name == "numba":
            yield from lookups(directory, keys, load_compiled(), rounds)
            yield from reference(directory, rounds)
        yield from owner(directory, rounds)
        yield from lookups(directory, keys, NumpyKernels(), min(rounds, 5))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--entries", type=int)
    arguments = parser.parse_args()
    return finish(
        "Directory lookups", lambda: rows(Plan.of(arguments), arguments.entries), arguments
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
