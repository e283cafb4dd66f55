"""SGLang's real HiCache with kvtier behind it: what a fresh engine reads is what another wrote."""

from __future__ import annotations

import signal

import pytest
from sglang_rig import needs_sglang

import kvtier

pytestmark = [needs_sglang, pytest.mark.timeout(240)]

WRITTEN = {"on_host": 128, "identical": True, "backend": "KvTierHiCacheStorage"}
FOUND = {"before": 0, "prefetched": 128, "on_host": 128, "identical": True}
ABSENT = {"before": 0, "prefetched": 0, "on_host": 0, "identical": False}

LAYOUTS = ["layer_first", "page_first_direct"]


def extra(daemon, **options):
    """The extra config that a server is started with."""
    return {
        "backend_name": "kvtier",
        "module_path": "kvtier_sglang",
        "class_name": "KvTierHiCacheStorage",
        "interface_v1": 1,
        "prefetch_threshold": 16,
        "hicache_storage_pass_prefix_keys": True,
        "kvtier_endpoint": daemon.url,
    } | options


@pytest.mark.parametrize("is_mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interface_v1", [1, 0], ids=["v1", "generic"])
def test_a_fresh_engine_finds_every_byte(daemon, walks, layout, is_mla, interface_v1):
    setup = {
        "layout": layout,
        "is_mla": is_mla,
        "extra": extra(daemon, interface_v1=interface_v1),
    }
    wrote = walks.write(**setup)
    assert {name: wrote.get(name) for name in WRITTEN} == WRITTEN, wrote
    with kvtier.connect(daemon.url) as kv:
        pages = 128 // 16 * (1 if is_mla else 2)
        assert kv.status().tiers[0].pages_sealed == pages
    assert walks.read(**setup) == FOUND
