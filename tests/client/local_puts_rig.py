"""What tests of puts by shared memory share: clients of one daemon, and looks at the daemon."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from contextlib import contextmanager

import kvtier
from kvtier.packing.record import decode_header
from tests.client.local_rig import NBYTES, arena_fd, attached, opaque

__all__ = ["header_of", "metrics", "opened", "remote", "soon"]


@contextmanager
def opened(process, *, nbytes=NBYTES, tenant="default", deadline=10.0, **options):
    with kvtier.connect(process.url, deadline=deadline, **options) as kv:
        ns = kv.namespace(opaque(nbytes), tenant=tenant)
        if options.get("plane") != "grpc":
            attached(kv)
        yield kv, ns


@contextmanager
def remote(shared, ns, **layout):
    """The same namespace for one that asks the daemon for everything."""
    with kvtier.connect(shared.url, deadline=10, plane="grpc") as kv:
        yield kv.namespace(ns.layout, tenant=ns.tenant)


def metrics(process) -> dict[str, float]:
    url = re.findall(r" metrics=(http://\S+)", process.log)[-1]
    text = urllib.request.urlopen(url, timeout=5).read().decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def soon(condition, within_s: float = 2.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def header_of(process, ref):
    """The header block of a host slot, as anybody finds it."""
    fd = arena_fd(process.pid)
    try:
        with open(fd, "rb", closefd=False) as arena:
            arena.seek(ref.slot * 4096)
            return decode_header(arena.read(4096))
    finally:
        os.close(fd)
