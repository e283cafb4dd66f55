"""The backend behind SGLang's own storage classes: what its factory makes, also with its fault
injector around it, and host pools in memory that it shares. Its server is a stand-in.
"""

from __future__ import annotations

import os
import random
from contextlib import ExitStack

import pytest
import torch
from pool_rig import PAGES, hashes, pool_with_heads, slots_of, states_pool
from sglang_standin import config, needs_wheel, transfer
from side_rig import FIRST

from kvtier.errors import UnknownConfigKey
from tests.seeds import seeds

pytestmark = needs_wheel

EVERY = list(range(PAGES))


@pytest.fixture
def make(sglang, daemon):
    """Attaches a backend as SGLang's controller does."""
    factory = sglang.module("mem_cache.storage.backend_factory").StorageBackendFactory
    extra = {
        "backend_name": "kvtier",
        "module_path": "kvtier_sglang",
        "class_name": "KvTierHiCacheStorage",
        "interface_v1": 1,
        "kvtier_endpoint": daemon.url,
    } | {f"kvtier_{call}_deadline": 5.0 for call in ("exists", "get", "set")}
    with ExitStack() as stack:

        def made(pool, **sides):
            backend = factory.create_backend("dynamic", config(extra_config=extra), pool)
            stack.callback(backend.close)
            backend.register_mem_pool_host(pool)
            for name, entry in {"kv": pool, **sides}.items():
                backend.register_mem_host_pool_v2(entry, sglang.storage.PoolName(name))
            backend.on_host_pools_registered()
            return backend

        yield made


def with_flat_pages(pool):
    """As the generic calls take pages of it."""
    buffer = pool.kv_buffer
    pool.get_data_page = lambda slot: buffer[:, slot // pool.page_size].flatten()
    pool.get_dummy_flat_data_page = lambda: torch.zeros_like(pool.get_data_page(0))
    return pool


def test_the_factory_makes_one_that_has_all_of_the_interface(sglang, make):
    backend = make(pool_with_heads(FIRST))
    assert isinstance(backend, sglang.storage.HiCacheStorage)
    assert type(backend).__name__ == "KvTierHiCacheStorage"
    inherited = [
        name
        for name, member in vars(sglang.storage.HiCacheStorage).items()
        if callable(member) and getattr(type(backend), name) is member
    ]
    # What there is nothing to do for.
    assert [name for name in inherited if not name.startswith("_")] == ["on_host_pools_registered"]


def test_pages_by_every_kind_of_call(sglang, make):
    pool, other = (
        with_flat_pages(pool_with_heads(FIRST)),
        with_flat_pages(pool_with_heads(FIRST, seed=9)),
    )
    states, others = states_pool(), states_pool(seed=9)
    one, two = make(pool, mamba=states), make(other, mamba=others)
    after = sglang.storage.HiCacheStorageExtraInfo(prefix_keys=hashes(2))
    assert one.batch_set_v1(hashes(2), slots_of([3, 1])) == [True] * 2
    assert one.batch_set_v1(hashes(4)[2:], slots_of([0, 2]), after) == [True] * 2
    assert two.batch_exists(hashes(5)) == 4
    assert two.batch_get_v1(hashes(5), slots_of([0, 1, 2, 3, 4])) == [True] * 4 + [False]
    assert torch.equal(other.kv_buffer[:, :4], pool.kv_buffer[:, [3, 1, 0, 2]])

    pages = [pool.get_data_page(place * pool.page_size) for place in (5, 6)]
    assert one.batch_set(hashes(2, prompt=1), pages)
    found = two.batch_get(hashes(3, prompt=1), [pool.get_dummy_flat_data_page() for _ in range(3)])
    assert torch.equal(found[0], pages[0])
    assert torch.equal(found[1], pages[1])
    assert found[2] is None
    assert one.set("ff" * 32, pages[0])
    assert two.exists("ff" * 32)
    assert torch.equal(two.get("ff" * 32), pages[0])

    places = transfer("mamba", keys=hashes(2), host_indices=torch.tensor([4, 5]))
    assert sglang.storage.count_pool_hits(one.batch_set_v2([places])) == {"mamba": 2}
    last = transfer("mamba", keys=[""], hit_policy="trailing_pages")
    result = two.batch_exists_v2(hashes(4), [last])
    assert isinstance(result, sglang.storage.PoolTransferResult)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (2, [1, 2])
    assert result.extra_pool_hit_pages == {"kv": 4, "mamba": 2}
    assert sglang.storage.count_pool_hits(two.batch_get_v2([places])) == {"mamba": 2}
    assert torch.equal(others.temporal_buffer[4:6], states.temporal_buffer[4:6])


@pytest.mark.parametrize("seed", seeds(2, of=10))
def test_random_calls_through_the_fault_injector(sglang, make, monkeypatch, seed):
    """A third of the calls fail before they reach the backend; what does reach it is right."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.33")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.001")
    chance = random.Random(seed)
    pool, other = pool_with_heads(FIRST), pool_with_heads(FIRST, seed=9)
    writer, reader = make(pool), make(other)
    assert isinstance(reader, sglang.storage.HiCacheStorageFailureInjector)
    reader._thread_local.random = random.Random(seed)  # of this thread, for both
    stored: set[int] = set()
    got = 0
    for _ in range(120):
        begin = chance.randrange(PAGES)
        some = list(range(begin, min(PAGES, begin + 3)))
        keys = [hashes(PAGES)[number] for number in some]
        if chance.random() < 0.3:
            answer = writer.batch_set_v1(keys, slots_of(some))
            assert answer in ([True] * len(some), [False] * len(some))
            stored.update(some if answer[0] else [])
            continue
        run = next((at for at, number in enumerate(some) if number not in stored), len(some))
        assert reader.batch_exists(keys) in (0, run)
        other.kv_buffer[:, some] = -1
        answer = reader.batch_get_v1(keys, slots_of(some))
        assert answer in ([False] * len(some), [True] * run + [False] * (len(some) - run))
        for number in some[: answer.count(True)]:
            assert torch.equal(other.kv_buffer[:, number], pool.kv_buffer[:, number])
            got += 1
    assert got > 20


@pytest.fixture
def shared(sglang):
    """A host pool in memory that SGLang would share, and that memory as a file."""
    pool = pool_with_heads(FIRST, seed=5)
    allocator = sglang.module("mem_cache.storage.mmap.mmap_allocator")
    tensor, fd, _ = allocator.alloc_shm(tuple(pool.kv_buffer.shape), pool.kv_buffer.dtype)
    pool.kv_buffer = tensor.copy_(pool.kv_buffer)
    yield pool, fd
    pool.kv_buffer = None
    os.close(fd)


def test_pages_to_and_from_memory_that_sglang_shares(make, shared):
    pool, fd = shared
    other = pool_with_heads(FIRST, seed=9)
    one, two = make(pool), make(other)
    assert one.batch_set_v1(hashes(PAGES), slots_of(EVERY)) == [True] * PAGES
    assert two.batch_get_v1(hashes(PAGES), slots_of(EVERY)) == [True] * PAGES
    assert torch.equal(other.kv_buffer, pool.kv_buffer)
    assert two.batch_set_v1(hashes(PAGES, prompt=1), slots_of(EVERY[::-1])) == [True] * PAGES
    assert one.batch_get_v1(hashes(PAGES, prompt=1), slots_of(EVERY)) == [True] * PAGES
    expected = other.kv_buffer.flip(1).contiguous()
    # Whoever else has the file sees them, too.
    assert os.pread(fd, expected.nbytes, 0) == bytes(expected.view(torch.uint8).numpy())


def test_what_the_factory_is_told_wrong_fails_the_attach_by_name(sglang, daemon):
    factory = sglang.module("mem_cache.storage.backend_factory").StorageBackendFactory
    extra = {"backend_name": "kvtier", "module_path": "kvtier_sglang", "class_name": "KvTier"}
    with pytest.raises(AttributeError, match="'KvTier' not found in module 'kvtier_sglang'"):
        factory.create_backend("dynamic", config(extra_config=extra), None)
    extra |= {"class_name": "KvTierHiCacheStorage", "kvtier_endpiont": daemon.url}
    with pytest.raises(UnknownConfigKey, match="kvtier_endpiont is no option"):
        factory.create_backend("dynamic", config(extra_config=extra), None)
