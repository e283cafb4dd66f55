"""A daemon whose host memory evicts by what it has learned (soak: it compiles for a minute)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvtier
from kvtier.testing.daemon_process import DaemonProcess
from tests.client.local_rig import opaque

pytest.importorskip("numba", reason="numba is not installed")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
NBYTES = 1 << 20
#: Pages of a conversation; host memory has room for four.
CHAIN = 8


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """Compiled beforehand: READY is waited for 20 s."""
    warm = "from kvtier.core.policy.gittins.warm import warm_up; warm_up()"
    subprocess.run([sys.executable, "-c", warm], check=True)
    base = Path(tempfile.mkdtemp(prefix="kvt-"))
    made = DaemonProcess(base, "host.policy=gittins", f"host.bytes={CHAIN * 4 + 3}MiB")
    yield made.start()
    made.close()
    shutil.rmtree(base)


def talk(ns: kvtier.client.sync.Namespace, number: int, **hint: object) -> list[bytes]:
    keys = ns.keys(range(1000 * number, 1000 * number + ns.layout.page_tokens * CHAIN))
    pages = np.full((CHAIN, NBYTES), number, np.uint8)
    assert ns.put(keys, pages, **hint).stored == CHAIN
    return keys


@pytest.mark.parametrize("hinted", [0, 1, 2])
def test_a_conversation_that_is_over_gives_way_first(daemon: DaemonProcess, hinted: int) -> None:
    with kvtier.connect(daemon.url, deadline=10) as kv:
        ns = kv.namespace(opaque(NBYTES))
        chains = [talk(ns, n, session_end=n == hinted) for n in range(3)]
        talk(ns, 3)
        talk(ns, 4)
        left = [ns.lookup(keys).prefix for keys in chains]
    assert [n for n in range(3) if left[n] < CHAIN] == [hinted]


def test_its_model_outlives_a_restart_and_a_damaged_one_is_named(daemon: DaemonProcess) -> None:
    with kvtier.connect(daemon.url, deadline=10) as kv:
        talk(kv.namespace(opaque(NBYTES)), 1)
    daemon.stop()
    file = daemon.directory / "forecasts"
    assert file.stat().st_size > 80_000
    daemon.start()
    assert "forecasts" not in daemon.log.split("daemon.ready")[-1]
    daemon.stop()
    blob = bytearray(file.read_bytes())
    blob[100] ^= 1
    file.write_bytes(blob)
    daemon.start()
    with kvtier.connect(daemon.url, deadline=10) as kv:
        (warning,) = [text for text in kv.status().warnings if "forecasts" in text]
    assert "host.policy learns anew" in warning
