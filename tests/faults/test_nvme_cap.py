"""nvme.bytes holds while keys are deleted that nobody has: what the journal says of them takes up
room too, however many come at once, and none of it is lost.
"""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

from fault_rig import DiskWatch, GetCode, Pages, disk_usage, tier_of

CAP = 16 << 20
PAGES = Pages(60 << 10)
#: More than fit.
PUT = 330
#: Keys a call of each client: more than a journal may hold, and less, but not several times.
KEYS_PER_CALL = (16_384, 16_384, 1_200, 300)
CLIENTS = len(KEYS_PER_CALL)


def test_the_cap_holds_under_deletes_of_unknown_keys(base, make_daemon, connect):
    daemon = make_daemon(f"nvme.bytes={CAP}", "host.bytes=64MiB").start()
    places = (base / "state", base / "nv")
    with connect(daemon) as kv:
        ns = kv.namespace(PAGES.layout)
        for at in range(0, PUT, 30):
            PAGES.put(ns, range(at, at + 30))
        assert tier_of(kv).used_bytes > CAP * 3 // 4, "full, so that all there is counts"
        last = range(PUT - 90, PUT)
        found = PAGES.get(ns, last)
        assert found.count(GetCode.HIT) == 90

    together = threading.Barrier(CLIENTS)

    def delete(number: int) -> None:
        """Unknown keys, in the last call with some that are there."""
        mine = PAGES.keys(last[number :: CLIENTS + 1])
        with connect(daemon) as kv:
            ns = kv.namespace(PAGES.layout)
            for turn in range(3):
                unknown = [secrets.token_bytes(32) for _ in range(KEYS_PER_CALL[number] - 50)]
                together.wait(20)
                ns.delete(unknown + mine * (turn == 2))

    with DiskWatch(*places) as watch, ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(delete, range(CLIENTS)))
    daemon.kill()
    highest = max(watch.highest, disk_usage(*places))
    assert watch.looks > 10
    assert highest <= CAP, f"{highest - CAP} bytes over, of {watch.looks} looks"

    with connect(daemon.start()) as kv:
        found = PAGES.get(kv.namespace(PAGES.layout), last)
    is_kept = [i % (CLIENTS + 1) == CLIENTS for i in range(90)]
    assert found == [GetCode.HIT if kept else GetCode.MISS for kept in is_kept]
