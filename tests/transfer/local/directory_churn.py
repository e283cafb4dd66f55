"""A process beside the tests: `write` changes a directory without end, `read` checks one.

    python directory_churn.py write KERNELS SEED
    python directory_churn.py read FD KERNELS SEED SECONDS

The writer prints its descriptor once the directory holds something. The reader prints what it
counted as JSON: an entry that is not what its key and generation say is a false hit, and so is a
generation older than one it has seen. Keys below STEADY are put once and never removed.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from directory_parts import BOOT_ID, NAMESPACE, SHARD, directory, kernels_named, keys_of, rows_of

from kvtier.transfer.local.directory import Directory
from kvtier.transfer.local.entry import identities
from kvtier.transfer.local.lookup import DirectoryView
from kvtier.transfer.local.protocol import DOUBT, MISS

PAGES = 64
STEADY = 24
KEYS = 160
HITS_MIN = 1000
LONGER_S = 20.0


class Churn:
    """Random puts and removals in small batches over a table that is always near its bound."""

    def __init__(self, made: Directory, seed: int) -> None:
        self._made = made
        self._keys = keys_of(seed, KEYS)
        self._draw = np.random.default_rng(seed + 1)
        self.generation = 1
        self.changes = 0
        made.put_many(rows_of(self._keys[:STEADY], 1))

    def step(self) -> None:
        chosen = self._keys[self._draw.integers(STEADY, KEYS, 6)]
        if self._draw.random() < 0.55:
            self.generation += 1
            self._made.put_many(rows_of(chosen, self.generation))
        else:
            self._made.remove_many(identities(chosen, namespaces=NAMESPACE, shards=SHARD))
        self.changes += len(chosen)


def write(kernels: str, seed: int) -> None:
    with directory(PAGES, kernels=kernels) as made:
        churn = Churn(made, seed)
        sys.stdout.write(f"{made.fd}\n")
        sys.stdout.flush()
        while True:
            churn.step()


def read(fd: int, kernels: str, seed: int, seconds: float) -> dict[str, int]:
    keys = keys_of(seed, KEYS)
    newest = np.zeros(KEYS, np.uint64)
    counts = {"lookups": 0, "hits": 0, "false_hits": 0, "lost": 0, "rechecks_failed": 0}
    draw = np.random.default_rng(seed + 2)
    with DirectoryView(fd, boot_id=BOOT_ID, kernels=kernels_named(kernels)) as view:
        until = time.monotonic() + seconds
        # Longer on a machine that has other things to do: some seconds of nothing show nothing.
        while (now := time.monotonic()) < until or (
            counts["hits"] <= HITS_MIN and now < until + LONGER_S
        ):
            chosen = draw.permutation(KEYS)[:96]
            found = view.lookup(keys[chosen], namespace=NAMESPACE, shard=SHARD)
            hits = found.hits
            entries, which = found.entries[hits], chosen[hits]
            expected = rows_of(keys[which], entries[:, 5])
            is_false = (entries[:, :15] != expected[:, :15]).any(axis=1)
            is_false |= entries[:, 5] < newest[which]
            newest[which] = entries[:, 5]
            same = view.recheck(found)
            counts["lookups"] += len(chosen)
            counts["hits"] += int(hits.sum())
            counts["false_hits"] += int(is_false.sum()) + int((same & ~hits).sum())
            counts["lost"] += int(((chosen < STEADY) & (found.codes == MISS)).sum())
            counts["rechecks_failed"] += int((hits & ~same).sum())
            assert int((found.codes == DOUBT).sum()) <= view.doubts
        return counts | {"torn_reads": view.torn_reads, "doubts": view.doubts}


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], int(sys.argv[3]))
    else:
        counted = read(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
        sys.stdout.write(json.dumps(counted) + "\n")
