"""The conformance checks on kvtier's backend and on SGLang's own file backend."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sglang_rig import needs_sglang

pytestmark = [needs_sglang, pytest.mark.timeout(240)]


def arena_of(pid):
    """The memory that a daemon keeps its pages in, as a file."""
    entries = Path(f"/proc/{pid}/fd").iterdir()
    return next(entry for entry in entries if os.readlink(entry).startswith("/memfd:kvtier-arena"))


@pytest.mark.parametrize("interface_v1", [1, 0], ids=["v1", "generic"])
def test_kvtier(roomy, walks, interface_v1):
    extra = {
        "backend_name": "kvtier",
        "module_path": "kvtier_sglang",
        "class_name": "KvTierHiCacheStorage",
        "interface_v1": interface_v1,
        "kvtier_endpoint": roomy.url,
        "kvtier_weights_fixed": True,  # in process there are no plugins
    }
    storage = str(arena_of(roomy.pid))
    results = walks.conform(backend="dynamic", extra=extra, storage=storage)
    assert {name: found for name, found in results.items() if found != ["pass", ""]} == {}
    assert len(results) == 13 + 22


def test_the_file_backend(walks):
    """What SGLang's own backend does today: its keys know neither the format nor the order of the
    bytes nor the weights, and nothing looks at the bytes. A page that is too short is an
    exception.
    """
    results = walks.conform(backend="file", extra={})
    assert {name for name, found in results.items() if found[0] != "pass"} == {
        "other number format",
        "other byte order",
        "other weights",
        "damage is a miss",
        *(f"swa: other {what}" for what in ("number format", "layers", "weights")),
        *(f"mamba: other {what}" for what in ("number format", "layers", "weights")),
        *(f"indexer: other {what}" for what in ("layers", "weights")),
        "damage to a side page is a miss",
    }
