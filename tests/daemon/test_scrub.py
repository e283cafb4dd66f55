"""A scrub of a real arena by a real process: what it finds, what it leaves alone, what it holds."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from scrub_rig import (
    BOOT,
    FAST,
    IDENTITY,
    NS,
    PAGE,
    frozen_in_a_batch,
    key_of,
    record_of,
    rig,
    until,
)

from kvtier.core.page import PageRef, Tier
from kvtier.daemon.scrub import ScrubCounts
from kvtier.errors import Busy, LimitExceeded
from kvtier.packing.record import HEADER_BYTES
from kvtier.transfer.place import Identity

HOST = Tier.HOST
RECORD = HEADER_BYTES + PAGE


def scrub(scrubber, tier=HOST, **options):
    return asyncio.run(scrubber.run(tier, bytes_per_second=FAST, **options))


def test_whole_pages_stay_and_progress_is_told_with_nothing_held():
    with rig(1) as made:
        for n in range(20):
            made.put(n)
        scrubber = made.scrubber()
        seen: list[ScrubCounts] = []

        async def progress(counts):
            assert made.pinned() == 0
            assert scrubber.running is HOST
            seen.append(counts)

        report = scrub(scrubber, on_progress=progress)
        assert report.counts == ScrubCounts(pages_done=20, pages_total=20, bytes_done=20 * PAGE)
        assert seen[-1] == report.counts
        assert [counts.pages_done for counts in seen] == [4, 8, 12, 16, 20], "a sixteenth each"
        assert report.error == ""
        assert report.ended_at > report.started_at
        assert (scrubber.last, scrubber.totals) == ({HOST: report}, {HOST: report.counts})
        assert (scrubber.running, scrubber.process_pid) == (None, None)
        assert made.rechecks == 0


def test_an_empty_tier_needs_no_process():
    with rig(1) as made:
        scrubber = made.scrubber(command=("/nonexistent",))
        assert scrub(scrubber).counts == ScrubCounts()


def test_the_process_runs_at_the_lowest_priority(caplog):
    caplog.set_level("INFO")
    with rig(1) as made:
        made.put(1)
        scrubber = made.scrubber()
        scrub(scrubber)
    (started,) = [record for record in caplog.records if record.message == "scrub.started"]
    assert started.nice == 19
    assert started.io_idle or "idle I/O class" in started.problems
    assert "; ".join(scrubber.problems) == started.problems


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("part", ["header", "payload"])
def test_one_flipped_bit_condemns_its_page_alone(part, seed, caplog):
    with rig(seed) as made:
        refs = [made.put(n) for n in range(9)]
        low, high = (0, HEADER_BYTES) if part == "header" else (HEADER_BYTES, RECORD)
        bad = made.random.sample(range(9), 2)
        for n in bad:
            made.flip(refs[n], made.random.randrange(low, high))
        report = scrub(made.scrubber())
        assert (report.counts.pages_done, report.counts.pages_corrupt) == (9, 2)
        assert made.rechecks == 2
        assert made.present(*range(9)) == [n for n in range(9) if n not in bad]
        assert made.store.status()[HOST].quarantined == 2
        assert [record.message for record in caplog.records].count("page.corrupt") == 2
        again = scrub(made.scrubber())
        assert (again.counts.pages_total, again.counts.pages_corrupt) == (7, 0)


def test_a_record_of_another_page_is_corrupt_however_good_its_sums_are(caplog):
    """One field of the header differs from what the index says; both its sums are right."""
    changes = ["slot", "generation", "boot", "key", "fingerprint", "namespace generation", "shard"]
    with rig(4) as made:
        made.put("whole")
        for change in changes:
            ref = made.put(change)
            fields = {"slot": ref.slot, "generation": ref.generation}
            fields |= {change: fields[change] + 1} if change in fields else {}
            identity = Identity(
                fingerprint=bytes(32) if change == "fingerprint" else IDENTITY.fingerprint,
                generation=IDENTITY.generation + (change == "namespace generation"),
                shard=int(change == "shard"),
            )
            record = record_of(
                PageRef(BOOT, HOST, **fields),
                bytes(PAGE),
                key_of("other" if change == "key" else change),
                boot_id=BOOT + (change == "boot"),
                identity=identity,
            )
            made.arena.view(ref.slot, 0, len(record))[:] = record
        assert scrub(made.scrubber()).counts.pages_corrupt == len(changes)
        assert made.present("whole", *changes) == ["whole"]
    found = {record.why for record in caplog.records if record.message == "page.corrupt"}
    assert found == {f"the header is another page's: {change}" for change in changes}


def test_a_page_that_is_whole_when_read_again_is_left_alone(caplog):
    with rig(5) as made:
        ref = made.put("a")
        before = bytes(made.arena.view(ref.slot, 0, RECORD))
        made.flip(ref, 5000)

        async def mended(reading, identity, key):
            made.arena.view(ref.slot, 0, RECORD)[:] = before
            return await made.recheck(reading, identity, key)

        assert scrub(made.scrubber(recheck=mended)).counts == ScrubCounts(
            pages_done=1, pages_total=1, bytes_done=PAGE
        )
        assert made.present("a") == ["a"]
        assert "scrub.false_alarm" in [record.message for record in caplog.records]


@pytest.mark.parametrize("seed", range(3))
def test_pages_that_go_while_the_scrub_runs(seed):
    """Deleted, evicted by new ones, or of a namespace that ended: done, never called corrupt."""
    with rig(seed) as made:
        names = list(range(60))
        for n in names:
            made.put(n)

        async def progress(counts):
            choice = made.random.randrange(3)
            if choice == 0:
                made.delete(*made.random.sample(names, 5))
            elif choice == 1:
                for n in range(12):
                    made.put((counts.pages_done, n))
            elif counts.pages_done > 30:
                made.known.clear()
                made.store.end_namespace(NS)
                made.store.open_namespace(NS, 1)

        counts = scrub(made.scrubber(), on_progress=progress).counts
        assert (counts.pages_done, counts.pages_total, counts.pages_corrupt) == (60, 60, 0)
        assert (counts.io_errors, made.rechecks) == (0, 0)


def test_slots_are_not_reused_while_the_process_reads_them():
    """Pages deleted, and their namespace ended, in the middle of a batch."""
    with rig(6) as made:
        for n in range(60):
            made.put(n)
        scrubber = made.scrubber()

        async def main():
            run = await frozen_in_a_batch(made, scrubber)
            held = made.pinned()
            made.delete(*range(30))
            made.known.clear()
            made.store.end_namespace(NS)
            while made.store.sweep(64):
                pass
            assert made.store.status()[HOST].retiring == held, "the batch's, and no more"
            made.known.add(NS)
            made.store.open_namespace(NS, 1)
            for n in range(50):
                made.put(("new", n))
            os.kill(scrubber.process_pid, signal.SIGCONT)
            return await run

        counts = asyncio.run(main()).counts
        assert (counts.pages_done, counts.pages_corrupt) == (60, 0)
        assert made.store.status()[HOST].retiring == 0


def test_one_scrub_at_a_time():
    with rig(7) as made:
        for n in range(8):
            made.put(n)
        scrubber = made.scrubber()

        async def main():
            first = asyncio.create_task(scrubber.run(HOST, bytes_per_second=FAST))
            await until(lambda: scrubber.running)
            with pytest.raises(Busy, match="host"):
                await scrubber.run(HOST, bytes_per_second=FAST)
            report = await first
            assert report.counts.pages_done == 8
            return await scrubber.run(HOST, bytes_per_second=FAST)

        assert asyncio.run(main()).counts.pages_done == 8


def test_a_tier_that_cannot_be_scrubbed():
    with rig(8) as made, pytest.raises(LimitExceeded, match="nvme") as caught:
        scrub(made.scrubber(), Tier.NVME)
    assert caught.value.remedy == "Use one of HOST."


def test_the_rate_is_kept_and_pages_are_free_meanwhile():
    with rig(9) as made:
        for n in range(8):
            made.put(n)
        scrubber, held = made.scrubber(), []

        async def main():
            rate = 8 * RECORD  # a second for all of them
            run = asyncio.create_task(scrubber.run(HOST, bytes_per_second=rate))
            await until(lambda: scrubber.process_pid)
            while not run.done():
                # In every turn of the loop: a page is held for several of them, however short.
                held.append(made.pinned())
                await asyncio.sleep(0)
            return await run

        report = asyncio.run(main())
        assert report.ended_at - report.started_at >= 0.75, "the last page need not be waited for"
        assert max(held) == 1, "a tenth of a second's pages, but one at the least"
        assert held.count(0) > len(held) * 0.7


def test_scrubs_come_again_and_again():
    with rig(10) as made:
        made.put(1)
        scrubber = made.scrubber()

        async def main():
            await scrubber.scrub_forever(0, bytes_per_second=FAST)  # never
            assert scrubber.last == {}
            forever = asyncio.create_task(scrubber.scrub_forever(0.01, bytes_per_second=FAST))
            await until(lambda: scrubber.totals.get(HOST, ScrubCounts()).pages_done >= 2)
            made.flip(made.put(2), 5000)
            await until(lambda: scrubber.totals[HOST].pages_corrupt)
            forever.cancel()
            with pytest.raises(asyncio.CancelledError):
                await forever

        asyncio.run(main())
        assert made.present(1, 2) == [1]
