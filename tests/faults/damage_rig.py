"""A daemon that was killed over pages that only the journal knows, and what it must serve then."""

from __future__ import annotations

from collections.abc import Sequence

from fault_rig import GetCode, Pages, disk_usage, tier_of, until, warnings_of

from kvtier.tiers.nvme_journal import journal_paths

HIT, MISS = GetCode.HIT, GetCode.MISS
#: Of a machine that is busy; they say nothing about the page.
LATER = (GetCode.BUSY, GetCode.TIMEOUT)
PAGES = Pages(5_000)
COUNT = 120
SETTINGS = ("nvme.bytes=8MiB", "nvme.checkpoint_s=3600")


def opened(connect, daemon):
    kv = connect(daemon)
    return kv, kv.namespace(PAGES.layout)


def killed_daemon(make_daemon, connect):
    """One that was killed over COUNT durable pages, of which those that 10 divides are deleted:
    all of it in the journal, none in the checkpoint.
    """
    made = make_daemon(*SETTINGS).start()
    kv, ns = opened(connect, made)
    for at in range(0, COUNT, 12):
        PAGES.put(ns, range(at, at + 12))
    ns.delete(PAGES.keys(range(0, COUNT, 10)))
    kv.close()
    made.kill()
    return made


def expected(but: set[int] = frozenset()) -> list[GetCode]:
    return [MISS if n % 10 == 0 or n in but else HIT for n in range(COUNT)]


def check_served(connect, daemon, codes: list[GetCode], *, unsure: bool = False) -> str:
    """It has what `codes` say, takes new pages, keeps them over a kill; its first warnings.

    `unsure`: of misses the next start may find some in a segment that is used again.
    """
    kv, ns = opened(connect, daemon)
    warnings = warnings_of(kv)
    assert tier_of(kv).pages_sealed == codes.count(HIT), warnings
    assert others(found(ns, range(COUNT)), codes) == {}, warnings
    PAGES.put(ns, range(COUNT, COUNT + 20))
    kv.close()
    daemon.kill()
    daemon.start()
    kv, ns = opened(connect, daemon)
    again = found(ns, range(COUNT + 20))
    kept = [
        before if unsure and before is MISS else now
        for before, now in zip(codes, again, strict=False)
    ]
    assert others(kept + again[COUNT:], codes + [HIT] * 20) == {}, warnings_of(kv)
    assert disk_usage(daemon.directory, daemon.base / "nv") <= 8 << 20
    return warnings


def found(ns, numbers: Sequence[int]) -> list[GetCode]:
    """What became of each, in the end: one for which there was no time or no room is asked for
    again, a miss never."""
    codes = dict(zip(numbers, PAGES.get(ns, numbers), strict=True))

    def is_told() -> bool:
        left = [number for number, code in codes.items() if code in LATER]
        codes.update(zip(left, PAGES.get(ns, left), strict=True) if left else ())
        return not left

    until(is_told)
    return list(codes.values())


def others(got: Sequence[GetCode], wanted: Sequence[GetCode]) -> dict[int, tuple[str, str]]:
    """Number of a page -> (what became of it, what should have)."""
    pairs = enumerate(zip(got, wanted, strict=True))
    return {number: (one.name, other.name) for number, (one, other) in pairs if one is not other}


def newest_journal(daemon):
    return max(journal_paths(daemon.directory).values())


def frame_offsets(path) -> list[int]:
    data, at, found = path.read_bytes(), 0, []
    while (at := data.find(b"\x89KVTFRM\n", at)) >= 0:
        found.append(at)
        at += 1
    return found
