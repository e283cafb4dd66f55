"""One writer and readers in processes of their own, over a small table that never rests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.transfer.local.lookup import DirectoryView
from kvtier.transfer.local.protocol import HIT
from tests.transfer.local.directory_churn import KEYS, PAGES, Churn
from tests.transfer.local.directory_parts import (
    BOOT_ID,
    KERNELS,
    NAMESPACE,
    SHARD,
    directory,
    kernels_named,
    keys_of,
    rows_of,
)

SCRIPT = Path(__file__).with_name("directory_churn.py")
SEED = 20


def started(*arguments: object, fd: int | None = None) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        pass_fds=() if fd is None else (fd,),
    )


def churned(kernels: str, seconds: float) -> tuple[int, list[dict[str, int]]]:
    """(changes made, what each of two readers counted): numba reads, and numpy."""
    with directory(PAGES, kernels=kernels) as made:
        churn = Churn(made, SEED)
        readers = [
            started("read", made.fd, reading.values[0] if reading != "numpy" else reading, SEED,
                    seconds, fd=made.fd)
            for reading in KERNELS
            if reading == "numpy" or not reading.marks[0].args[0]
        ]  # fmt: skip
        while any(reader.poll() is None for reader in readers):
            for _ in range(50):
                churn.step()
        counts = []
        for reader in readers:
            out = reader.communicate(timeout=30)[0]
            assert reader.returncode == 0
            counts.append(json.loads(out))
        return churn.changes, counts


def check(changes: int, counts: list[dict[str, int]]) -> None:
    sys.stdout.write(f"{changes} changes, readers counted {counts}\n")
    assert changes > 1000
    for counted in counts:
        assert counted["hits"] > 1000
        assert counted["false_hits"] == 0
        assert counted["lost"] == 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_readers_never_see_what_was_not_put(kernels):
    check(*churned(kernels, 1.5 if kernels == "numba" else 0.7))


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kernels", KERNELS)
def test_readers_never_see_what_was_not_put_for_long(kernels):
    check(*churned(kernels, 60.0))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2))])
def test_a_killed_writer_leaves_hits_that_are_true_and_misses(kernels, seed):
    writer = started("write", kernels, seed)
    try:
        assert writer.stdout is not None
        fd = os.open(f"/proc/{writer.pid}/fd/{int(writer.stdout.readline())}", os.O_RDONLY)
        time.sleep(0.05 + 0.037 * seed)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=10)
    keys = keys_of(seed, KEYS)
    with DirectoryView(fd, boot_id=BOOT_ID, kernels=kernels_named(kernels)) as view:
        os.close(fd)
        first = view.lookup(keys, namespace=NAMESPACE, shard=SHARD)
        assert view.is_open
        assert first.hits.any()
        entries = first.entries[first.hits]
        expected = rows_of(keys[first.hits], entries[:, 5])
        assert np.array_equal(entries[:, :15], expected[:, :15])
        for _ in range(20):
            again = view.lookup(keys, namespace=NAMESPACE, shard=SHARD)
            assert np.array_equal(again.codes, first.codes)
            assert np.array_equal(again.words, first.words)
        assert view.recheck(first).tolist() == (first.codes == HIT).tolist()
