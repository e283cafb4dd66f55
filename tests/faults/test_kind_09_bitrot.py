"""Kind 09, BITROT: a thousand flipped bits, under a daemon that was killed, stopped or runs. No
wrong page is served, each damaged one is counted once, and a bit that nobody uses does nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from fault_rig import (
    BLOCK,
    Found,
    GetCode,
    Pages,
    Saved,
    flip_bit,
    newest,
    records,
    recovered,
    segments,
    tier_of,
    warnings_of,
)

from kvtier.core.page import Tier
from kvtier.tiers.nvme_journal import journal_paths

HIT, MISS, CORRUPT = GetCode.HIT, GetCode.MISS, GetCode.CORRUPT
PAGES = Pages(600)
COUNT = 600
FLIPS = 1_000
SETTINGS = ("nvme.bytes=8MiB", "nvme.checkpoint_s=3600")


@pytest.fixture
def daemon(make_daemon, connect):
    """One that was killed over COUNT durable pages."""
    made = make_daemon(*SETTINGS).start()
    kv, ns = opened(connect, made)
    PAGES.put(ns, range(COUNT))
    kv.close()
    made.kill()
    return made


def opened(connect, daemon):
    kv = connect(daemon)
    return kv, kv.namespace(PAGES.layout)


def live(daemon) -> dict[int, Found]:
    by_key = {key: found for (_, key), found in newest(records(daemon.base / "nv")).items()}
    return {number: by_key[PAGES.key(number)] for number in range(COUNT)}


def flip_live_bits(daemon, seed: int) -> tuple[set[int], set[int]]:
    """FLIPS different bits of live records; pages whose header is hit, and those whose payload is
    alone."""
    rng, found = random.Random(seed), live(daemon)
    bits = set()
    while len(bits) < FLIPS:
        number, at = rng.randrange(COUNT), rng.randrange(BLOCK + PAGES.page_bytes)
        bits.add((number, at, rng.randrange(8)))
    for number, at, bit in bits:
        flip_bit(found[number].path, found[number].offset + at, bit)
    in_header = {number for number, at, _ in bits if at < BLOCK}
    return in_header, {number for number, _, _ in bits} - in_header


def codes_of(bad: Iterable[int], code: GetCode, others: GetCode = HIT) -> list[GetCode]:
    return [code if number in set(bad) else others for number in range(COUNT)]


def test_under_a_killed_daemon(daemon, connect):
    """Headers are scanned: those that are damaged are found by the start, the rest by readers."""
    in_header, in_payload = flip_live_bits(daemon, seed=1)
    daemon.start()
    kv, ns = opened(connect, daemon)
    assert recovered(daemon)["damaged"] == len(in_header)
    assert recovered(daemon)["found"] == COUNT - len(in_header)
    assert f"{len(in_header)} records have a damaged header" in warnings_of(kv)
    first = PAGES.get(ns, range(COUNT))
    assert [n for n, code in enumerate(first) if code is CORRUPT] == sorted(in_payload)
    assert [n for n, code in enumerate(first) if code is MISS] == sorted(in_header)
    assert kv.status().counters["condemned"] == len(in_payload)
    bad = in_header | in_payload
    for _ in range(2):
        assert PAGES.get(ns, range(COUNT)) == codes_of(bad, MISS)
    assert kv.status().counters["condemned"] == len(in_payload)
    kv.close()
    daemon.kill()
    daemon.start()
    kv, ns = opened(connect, daemon)
    assert PAGES.get(ns, range(COUNT)) == codes_of(bad, MISS), "what was condemned stays away"
    PAGES.put(ns, sorted(bad))
    kv.close()
    daemon.kill()
    daemon.start()
    _, ns = opened(connect, daemon)
    assert PAGES.get(ns, range(COUNT)) == [HIT] * COUNT


@pytest.mark.parametrize(
    "is_running",
    [pytest.param(False, id="stopped", marks=pytest.mark.soak), pytest.param(True, id="running")],
)
def test_where_nothing_is_scanned(daemon, connect, is_running):
    """Readers find what they read, Verify the rest of it, nobody anything twice."""
    daemon.start()
    assert daemon.stop() == 0
    if is_running:
        daemon.start()
        in_header, in_payload = flip_live_bits(daemon, seed=2)
    else:
        in_header, in_payload = flip_live_bits(daemon, seed=3)
        daemon.start()
    kv, ns = opened(connect, daemon)
    assert tier_of(kv).pages_sealed == recovered(daemon)["listed"] == COUNT
    bad = in_header | in_payload
    half = range(0, COUNT, 2)
    by_readers = PAGES.get(ns, half)
    assert by_readers == [CORRUPT if n in bad else HIT for n in half]
    found = kv.verify(Tier.NVME, bytes_per_second=1 << 30)
    assert found.pages_corrupt == len(bad) - by_readers.count(CORRUPT)
    assert found.pages_done == found.pages_total == COUNT - by_readers.count(CORRUPT)
    assert kv.status().counters["condemned"] == len(bad)
    assert PAGES.get(ns, range(COUNT)) == codes_of(bad, MISS)
    assert tier_of(kv).pages_sealed == COUNT - len(bad)
    kv.close()
    daemon.kill()
    daemon.start()
    _, ns = opened(connect, daemon)
    assert PAGES.get(ns, range(COUNT)) == codes_of(bad, MISS)


def unused_bytes(daemon, deleted: set[int]) -> Callable[[random.Random], tuple[Path, int]]:
    """Draws a byte that belongs to no page: behind a payload, in a deleted page's payload, in a
    slot that was never written, behind the last slot."""
    found = live(daemon)
    used = {
        (record.path, (record.offset + at) // BLOCK)
        for record in found.values()
        for at in range(0, record.record_bytes, BLOCK)
    }
    empty = [
        (path, block)
        for path in segments(daemon.base / "nv")
        for block in range(1, path.stat().st_size // BLOCK)
        if (path, block) not in used
    ]
    assert empty

    def draw(rng: random.Random) -> tuple[Path, int]:
        if rng.random() < 0.3:
            path, block = rng.choice(empty)
            return path, block * BLOCK + rng.randrange(BLOCK)
        number = rng.randrange(COUNT)
        record = found[number]
        low = 0 if number in deleted else PAGES.page_bytes
        return record.path, record.payload_offset + rng.randrange(low, BLOCK)

    return draw


def test_unused_bits_do_nothing(daemon, connect):
    deleted = set(range(0, COUNT, 7))
    daemon.start()
    kv, ns = opened(connect, daemon)
    ns.delete(PAGES.keys(sorted(deleted)))
    kv.close()
    daemon.kill()
    rng, draw = random.Random(4), unused_bytes(daemon, deleted)
    for _ in range(FLIPS):
        path, at = draw(rng)
        flip_bit(path, at, rng.randrange(8))
    for is_clean in (False, True):
        if is_clean:
            assert daemon.stop() == 0
        daemon.kill()
        daemon.start()
        kv, ns = opened(connect, daemon)
        assert recovered(daemon)["damaged"] == 0
        assert warnings_of(kv) == ""
        assert PAGES.get(ns, range(COUNT)) == codes_of(deleted, MISS)
        assert kv.status().counters["condemned"] == 0


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_bits_of_state_files(daemon, connect, count):
    """Of a checkpoint: the one before it is used. Of a journal's frames: one frame is lost."""
    daemon.start()
    kv, ns = opened(connect, daemon)
    PAGES.put(ns, range(COUNT, COUNT + 50))
    kv.close()
    assert daemon.stop() == 0
    daemon.start()
    kv, ns = opened(connect, daemon)
    ns.delete(PAGES.keys(range(50)))
    for number in range(COUNT + 50, COUNT + 60):
        PAGES.put(ns, [number])
        ns.delete(PAGES.keys([number]))
    kv.close()
    daemon.kill()
    saved, rng = Saved(daemon), random.Random(5)
    right = [MISS] * 50 + [HIT] * COUNT + [MISS] * 10

    checkpoint = daemon.directory / "checkpoint"
    for _ in range(count):
        flip_bit(checkpoint, rng.randrange(checkpoint.stat().st_size), rng.randrange(8))
        daemon.start()
        kv, ns = opened(connect, daemon)
        assert warnings_of(kv).count("nvme: checkpoint: ") == 1
        assert PAGES.get(ns, range(COUNT + 60)) == right
        kv.close()
        daemon.kill()
        saved.put_back()

    journal = max(journal_paths(daemon.directory).values())
    data = journal.read_bytes()
    frames = [at for at in range(64, len(data), 64) if data[at : at + 8] == b"\x89KVTFRM\n"]
    for _ in range(count):
        frame = rng.choice(frames[1:-1])
        length = int.from_bytes(data[frame + 8 : frame + 12], "little")
        flip_bit(journal, frame + rng.randrange(32 + length), rng.randrange(8))
        daemon.start()
        kv, ns = opened(connect, daemon)
        assert recovered(daemon)["bad_frames"] == 1
        assert "1 damaged entries of the journal were left out" in warnings_of(kv)
        # A deletion that is lost gives back the page that was deleted, and never another one.
        codes = PAGES.get(ns, range(COUNT + 60))
        assert codes[:-10] == right[:-10]
        assert codes[-10:].count(HIT) <= 1
        kv.close()
        daemon.kill()
        saved.put_back()
