"""Kind 16, DISKFULL, its files taken away under a running daemon: nothing that lies in a file
without a name is called durable, and the device says why it is offline.
"""

from __future__ import annotations

import shutil

import pytest
from fault_rig import GetCode, Pages, segments, warnings_of

from kvtier.cli import main

HIT, MISS = GetCode.HIT, GetCode.MISS
PAGES = Pages(5_000)
NUMBERS = range(60)


def put(ns, numbers) -> int:
    """All are in the cache; how many are durable."""
    given = ns.put(
        PAGES.keys(numbers), [PAGES.page(n) for n in numbers], durable="nvme", chain=False
    )
    assert given.stored == len(numbers), given
    return given.durable


@pytest.mark.parametrize("removed", ["directory", "segment", "segment, for a copy"])
def test_a_put_of_what_was_there_is_durable_or_says_no(make_daemon, connect, removed, base):
    """Also at once, before anything else has noticed; then the other device takes it."""
    a, b = base / "a", base / "b"
    daemon = make_daemon(f"nvme.paths={a},{b}", "nvme.bytes=32MiB", "nvme.retry_s=3600").start()
    kv = connect(daemon)
    ns = kv.namespace(PAGES.layout)
    assert put(ns, NUMBERS) == len(NUMBERS)
    assert segments(a)
    if removed == "directory":
        shutil.rmtree(a)
    elif removed == "segment":
        segments(a)[0].unlink()
    else:
        shutil.copy(segments(a)[0], base / "copy")
        (base / "copy").replace(segments(a)[0])
    assert put(ns, NUMBERS) == len(NUMBERS)
    online = {device.path: device.is_online for device in kv.status().devices}
    assert online == {str(a): False, str(b): True}
    assert f"nvme: {a} is offline: " in warnings_of(kv)
    kv.close()
    daemon.kill()
    if removed == "directory":
        a.mkdir(mode=0o700)
    daemon.start()
    ns = connect(daemon).namespace(PAGES.layout)
    assert PAGES.get(ns, NUMBERS) == [HIT] * len(NUMBERS)


def test_verify_gives_up_what_it_cannot_read(make_daemon, connect, capsys):
    """Whichever notices first: afterwards no page there is called durable."""
    daemon = make_daemon("nvme.bytes=32MiB", "nvme.retry_s=3600").start()
    kv = connect(daemon)
    ns = kv.namespace(PAGES.layout)
    assert put(ns, NUMBERS) == len(NUMBERS)
    nv = daemon.base / "nv"
    for path in segments(nv):
        path.rename(nv / f"{path.name}.away")
    code = main(["verify", "--url", daemon.url, "--tier", "nvme"])
    said = capsys.readouterr().out
    assert (code == 1) == (" 0 unreadable" not in said)
    assert not kv.status().devices[0].is_online
    assert put(ns, NUMBERS) == 0
