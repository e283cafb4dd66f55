"""A daemon that is a dict, a layout, and a connection to it."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest

import kvtier
from tests.client.fake_daemon import FakeDaemon
from tests.client.local_rig import NBYTES, attached, opaque, two_segments
from tests.forks import ForkedDaemon


@pytest.fixture
def daemon(tmp_path):
    made = FakeDaemon(tmp_path / "d.sock")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def process(forker):
    base = Path(tempfile.mkdtemp(prefix="kvt-"))
    with ForkedDaemon(forker, base, "host.bytes=64MiB") as running:
        yield running
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def layout():
    """Pages of 4 tokens, 1,024 bytes of bfloat16: k and v of 2 layers, 2 heads, 16 numbers."""
    return two_segments(layers=2, heads=2, dim=16)


@pytest.fixture
def kv(daemon):
    with kvtier.connect(daemon.url, deadline=5.0) as connection:
        yield connection


@pytest.fixture
def ns(kv, layout):
    return kv.namespace(layout)


@pytest.fixture
def make_pages(layout):
    """n different pages as bytes, finite as bfloat16."""

    def make(count, seed=0):
        rng = random.Random(seed)
        numbers = [0x3F80 + rng.randrange(64) for _ in range(count * layout.raw_bytes // 2)]
        data = b"".join(number.to_bytes(2, "little") for number in numbers)
        size = layout.raw_bytes
        return [data[at : at + size] for at in range(0, len(data), size)]

    return make


@pytest.fixture
def local_kv(process):
    """A connection to a real daemon, whose shared memory it reads once a namespace is open."""
    with kvtier.connect(process.url, deadline=10) as connection:
        yield connection


@pytest.fixture
def local_ns(local_kv):
    """Pages of local_rig.NBYTES; shared memory is read."""
    opened = local_kv.namespace(opaque(NBYTES))
    attached(local_kv)
    return opened
