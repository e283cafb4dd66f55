"""SGLang's real HiCache with kvtier behind it: what a fresh engine reads is what another wrote."""

from __future__ import annotations

import signal
import time

import pytest
from sglang_rig import needs_sglang

import kvtier
from tests.forks import daemon_of_its_own

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
        "kvtier_weights_fixed": True,  # in process there are no plugins
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


@pytest.fixture(params=["local", "grpc"])
def plane(request, forker):
    """The name of a plane, and a daemon that clients reach by it."""
    switch = {"local": "on", "grpc": "off"}[request.param]
    with daemon_of_its_own(forker, "host.bytes=64MiB", f"local.plane={switch}") as running:
        yield request.param, running


@pytest.mark.parametrize("allocator", ["default", "shm"])
@pytest.mark.parametrize("is_mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_by_every_plane_and_to_every_kind_of_host_memory(plane, walks, layout, is_mla, allocator):
    name, daemon = plane
    setup = {"layout": layout, "is_mla": is_mla, "extra": extra(daemon, allocator=allocator)}
    wrote = walks.write(**setup)
    assert {key: wrote.get(key) for key in WRITTEN} == WRITTEN, wrote
    ways = {"local": name == "local", "memfd": allocator == "shm"}
    assert walks.read_by(**setup) == FOUND | ways


def test_other_bytes_would_be_seen(daemon, walks):
    setup = {"layout": "page_first_direct", "extra": extra(daemon)}
    walks.write(**setup)
    assert walks.read(**setup, seed=2) == FOUND | {"identical": False}


def test_a_pool_by_layers_and_one_by_pages_have_the_same_pages(daemon, walks):
    walks.write(layout="layer_first", extra=extra(daemon))
    assert walks.read(layout="page_first_direct", extra=extra(daemon)) == FOUND


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "float16"},
        {"page_size": 32},
        {"overrides": '{"rope_theta": 1000.0}'},
        {"extra": {"kvtier_weights_revision": "r2"}},
        {"extra": {"kvtier_model_id": "another"}},
        {"extra": {"kvtier_tenant": "another"}},
        {"extra": {"kvtier_salt": "another"}},
    ],
    ids=str,
)
def test_servers_that_differ_never_share_a_page(daemon, walks, changed):
    setup = {"layout": "page_first_direct", "extra": extra(daemon)}
    walks.write(**setup)
    other = setup | changed | {"extra": extra(daemon, **changed.get("extra", {}))}
    assert walks.read(**other) == ABSENT
    assert walks.read(**setup) == FOUND


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kvtier_endpiont": "x"}, "UnknownConfigKey: kvtier_endpiont"),
        ({"kvtier_get_deadline": 60}, "InvalidConfigValue: kvtier_get_deadline is 60"),
    ],
)
def test_options_that_make_no_sense_fail_the_attach(daemon, walks, options, said):
    answer = walks.read(layout="page_first_direct", extra=extra(daemon, **options))
    assert answer["error"].startswith(said)


def test_without_a_daemon_there_are_misses_and_with_one_again_there_are_hits(daemon, walks):
    setup = {"layout": "page_first_direct", "extra": extra(daemon)}
    daemon.kill()
    assert walks.read(**setup) == ABSENT
    wrote = walks.write(**setup)
    assert {name: wrote.get(name) for name in WRITTEN} == WRITTEN, wrote
    daemon.start()
    assert walks.write(**setup)["identical"]
    assert walks.read(**setup) == FOUND


def test_a_stopped_daemon_costs_the_deadline_and_no_more(daemon, walks):
    setup = {"layout": "page_first_direct", "extra": extra(daemon)}
    walks.write(**setup)
    daemon.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert walks.read(**setup) == ABSENT
        # To open two namespaces (2 s each), to ask for the pages (0.1 s), and an engine of its own.
        assert time.monotonic() - began < 8
    finally:
        daemon.signal(signal.SIGCONT)
    assert walks.read(**setup) == FOUND
