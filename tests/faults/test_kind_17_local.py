"""Kind 17, TORN, of puts by shared memory: the daemon is killed before and after the pages that a
client has written become findable.
"""

from __future__ import annotations

import signal

import pytest

import kvtier
from kvtier.tiers.crash_points import CRASH_POINTS
from tests.faults.local_crew import client, settled, store
from tests.faults.local_roles import PAGES

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("point", [name for name in CRASH_POINTS if name.startswith("local.")])
def test_killed_at_while_a_client_puts(point, nth, make_daemon):
    """Nothing is STORED that was not answered, nothing is wrong, and the next daemon serves."""
    daemon = make_daemon().start(crash_point=f"{point}:{nth}")
    with client(daemon, deadline=2.0) as (kv, ns):
        for turn in range(100):
            before, lost = kv.local.puts, range(4 * turn, 4 * turn + 4)
            put = store(ns, lost)
            assert kv.local.puts.stored - before.stored in (0, 4)
            if put.stored < 4:
                break
        assert put.reasons == [PutCode.UNAVAILABLE] * 4
        assert kv.local.puts.stored == before.stored
        assert daemon.wait() == -signal.SIGKILL
        # What it can still read of that memory is right, or nothing; `Pages.get` compares.
        everything = range(lost.stop)
        seen = set(PAGES.get(ns, everything))
        assert seen <= {GetCode.HIT, GetCode.MISS, GetCode.UNAVAILABLE}

        daemon.start()
        there = {PutCode.STORED, PutCode.EXISTS}
        settled(lambda: set(store(ns, lost).reasons) <= there, within_s=5)
        assert set(PAGES.get(ns, everything)) <= {GetCode.HIT, GetCode.MISS}
        assert PAGES.get(ns, lost) == [GetCode.HIT] * 4
        more = iter(range(1000, 100_000))

        def is_local() -> bool:
            before = kv.local.puts.stored
            return store(ns, [next(more)]).stored == 1 and kv.local.puts.stored > before

        settled(is_local, within_s=5)
    assert "Traceback" not in daemon.log
