"""Kind 17, TORN: segment files that were cut, made longer or swapped while the daemon was down are
not used, and named; everything else is as it was.
"""

from __future__ import annotations

import os

import pytest
from fault_rig import (
    GetCode,
    Pages,
    Saved,
    disk_usage,
    leftovers,
    records,
    segments,
    tier_of,
    warnings_of,
)

HIT, MISS = GetCode.HIT, GetCode.MISS
CAP = 8 << 20


def damage(files) -> list:
    """Spoils seven of the files, each in its own way; those that are spoiled."""
    size = files[0].stat().st_size
    for path, length in zip(files, (0, 1, size // 2, size - 1, size + 1), strict=False):
        os.truncate(path, length)
    first, second = files[5:7]
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return files[:7]


def test_cut_long_and_swapped_segments(make_daemon, connect):
    pages = Pages(5_000)
    daemon = make_daemon(f"nvme.bytes={CAP}", "nvme.checkpoint_s=3600").start()
    kv = connect(daemon)
    ns = kv.namespace(pages.layout)
    nv = daemon.base / "nv"
    count = 0
    while len(segments(nv)) < 9:
        pages.put(ns, range(count, count + 30))
        count += 30
    kv.close()
    daemon.kill()
    where = {record.header.key: record.path for record in records(nv)}
    scanned = Saved(daemon)
    for is_clean in (False, True):
        if is_clean:
            daemon.kill()
            scanned.put_back()
            daemon.start()
            assert daemon.stop() == 0
        spoiled = damage(segments(nv))
        daemon.start()
        kv = connect(daemon)
        ns = kv.namespace(pages.layout)
        said = warnings_of(kv)
        assert all(str(path) in said for path in spoiled), said
        assert said.count("\n") + 1 == len(spoiled)
        codes = pages.get(ns, range(count))
        lost = {n for n in range(count) if where[pages.key(n)] in spoiled}
        assert codes == [MISS if n in lost else HIT for n in range(count)]
        assert 0 < len(lost) < count
        # Their place is used again.
        pages.put(ns, sorted(lost))
        assert tier_of(kv).pages_sealed == count
        assert not leftovers(nv)
        assert disk_usage(daemon.directory, nv) <= CAP
        kv.close()
        daemon.kill()
        daemon.start()
        kv = connect(daemon)
        ns = kv.namespace(pages.layout)
        assert pages.get(ns, range(count)) == [HIT] * count
        assert tier_of(kv).pages_sealed == count


@pytest.mark.parametrize("is_clean", [False, True])
def test_segments_that_are_gone(make_daemon, connect, is_clean):
    pages = Pages(5_000)
    daemon = make_daemon(f"nvme.bytes={CAP}").start()
    ns = connect(daemon).namespace(pages.layout)
    pages.put(ns, range(120))
    if is_clean:
        assert daemon.stop() == 0
    daemon.kill()
    nv = daemon.base / "nv"
    first, *_ = segments(nv)
    lost = {record.header.key for record in records(nv) if record.path == first}
    first.unlink()
    daemon.start()
    kv = connect(daemon)
    ns = kv.namespace(pages.layout)
    codes = pages.get(ns, range(120))
    assert codes == [MISS if pages.key(n) in lost else HIT for n in range(120)]
    pages.put(ns, range(120))
    kv.close()
    daemon.kill()
    daemon.start()
    ns = connect(daemon).namespace(pages.layout)
    assert pages.get(ns, range(120)) == [HIT] * 120
