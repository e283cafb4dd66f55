"""What becomes of a scrub whose process dies, hangs or answers nonsense: it ends, in words, and
nothing is left behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from scrub_rig import FAST, PAGE, Rig, frozen_in_a_batch, is_gone, rig, until

from kvtier.core.page import Tier
from kvtier.errors import DaemonUnavailable, DeadlineExceeded
from kvtier.testing.daemon_process import stop_process

HOST = Tier.HOST


def again(made: Rig, scrubber) -> None:
    """Nothing is held, and the next scrub works, with a process of its own."""
    made.settled()
    assert (scrubber.running, scrubber.process_pid) == (None, None)
    report = asyncio.run(scrubber.run(HOST, bytes_per_second=FAST))
    assert (report.error, report.counts.pages_done) == ("", report.counts.pages_total)


def filled(made: Rig) -> Rig:
    for n in range(20):
        made.put(n)
    return made


def test_killed_in_a_batch(caplog):
    with rig(1) as made:
        scrubber = filled(made).scrubber()

        async def main():
            run = await frozen_in_a_batch(made, scrubber)
            pid = scrubber.process_pid
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(DaemonUnavailable, match=r"signal 9 \(Killed\)") as caught:
                await run
            assert is_gone(pid)
            return caught.value

        error = asyncio.run(main())
        assert error.remedy
        last = scrubber.last[HOST]
        assert (last.error, last.counts.pages_done) == (str(error), 4)
        assert "scrub.failed" in [record.message for record in caplog.records]
        again(made, scrubber)


def test_hung_in_a_batch():
    with rig(2) as made:
        scrubber = filled(made).scrubber(silence_s=0.3)

        async def main():
            run = await frozen_in_a_batch(made, scrubber)
            pid = scrubber.process_pid
            with pytest.raises(DeadlineExceeded, match=r"did not answer for 0\.3 s"):
                await run
            assert is_gone(pid)

        asyncio.run(main())
        again(made, scrubber)


def test_cancelled_in_a_batch():
    with rig(3) as made:
        scrubber = filled(made).scrubber()

        async def main():
            run = await frozen_in_a_batch(made, scrubber)
            pid = scrubber.process_pid
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert is_gone(pid)
            assert made.pinned() == 0

        asyncio.run(main())
        assert scrubber.last[HOST].error == "ended by its caller"
        again(made, scrubber)


def test_a_page_is_held_until_its_second_reading_has_ended():
    """The caller is cancelled while this process reads the page again."""
    with rig(4) as made:
        made.flip(filled(made).refs[0], 5000)
        reads = asyncio.Event()
        go_on = asyncio.Event()

        async def slow(reading, identity, key):
            reads.set()
            await go_on.wait()
            return await made.recheck(reading, identity, key)

        async def main():
            run = asyncio.create_task(made.scrubber(recheck=slow).run(HOST, bytes_per_second=FAST))
            await reads.wait()
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert made.pinned() == 1
            go_on.set()
            await until(lambda: made.pinned() == 0)

        asyncio.run(main())
        assert made.present(0) == [0], "nobody was left to condemn it"


def test_what_on_progress_raises_ends_the_scrub():
    with rig(5) as made:
        scrubber = filled(made).scrubber()

        async def refuse(counts):
            raise DeadlineExceeded("the reader stands still", remedy="read")

        with pytest.raises(DeadlineExceeded, match="stands still"):
            asyncio.run(scrubber.run(HOST, bytes_per_second=FAST, on_progress=refuse))
        assert scrubber.last[HOST].counts.pages_done == 4
        again(made, scrubber)


#: A process that greets as it should and then runs `then`, with the batch's body in `body`.
LIAR = """
import os, struct, sys, time
import msgpack

def read():
    head = os.read(0, 4)
    return msgpack.unpackb(os.read(0, struct.unpack("<I", head)[0])) if head else sys.exit(0)

def say(message):
    body = message if type(message) is bytes else msgpack.packb(message)
    os.write(1, struct.pack("<I", len(body)) + body)

read()
say({"version": 1, "nice": 19, "io_idle": True, "problems": []})
body = read()
whole = {"number": body["number"], "corrupt": [], "io_errors": [], "owed_s": 0.0}
"""
NONSENSE = {
    "garbage": 'say(b"\\xc1\\xff garbage")',
    "no map": "say([1, 2])",
    "empty": 'say(b"")',
    "a frame too long": 'os.write(1, b"\\xff" * 4096); time.sleep(60)',
    "another batch": 'say(whole | {"number": 77})',
    "a page that was not sent": 'say(whole | {"corrupt": [[999, "bad"]]})',
    "a page before the first": 'say(whole | {"corrupt": [[-1, "bad"]]})',
    "a page twice": 'say(whole | {"corrupt": [[0, "bad"]], "io_errors": [[0, "bad"]]})',
    "no reason": 'say(whole | {"corrupt": [[0]]})',
    "fields of other types": 'say(whole | {"corrupt": [["0", "bad"]]})',
    "half an answer": 'os.write(1, b"\\x10\\x00\\x00\\x00abc"); sys.exit(3)',
    "an exit": "sys.exit(3)",
    "a shut pipe": "os.close(1); time.sleep(60)",
    "an endless wait": 'say(whole | {"owed_s": float("inf")})',
    "no number": 'say(whole | {"owed_s": float("nan")})',
    "a crash": 'raise RuntimeError("in the process")',
}


@pytest.mark.parametrize("then", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_ends_the_scrub_and_condemns_nothing(then, caplog):
    with rig(6) as made:
        scrubber = filled(made).scrubber(command=(sys.executable, "-c", LIAR + then))
        with pytest.raises(DaemonUnavailable) as caught:
            asyncio.run(scrubber.run(HOST, bytes_per_second=FAST))
        assert caught.value.remedy
        made.settled()
        assert made.present(*range(20)) == list(range(20))
        assert made.rechecks == 0
        assert scrubber.last[HOST].counts.pages_done == 0
        if "raise" in then:
            said = [r.text for r in caplog.records if r.message == "scrub.process_said"]
            assert said[-1] == "RuntimeError: in the process"


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (("/nonexistent/python",), DaemonUnavailable),
        ((sys.executable, "-c", "pass"), DaemonUnavailable),
        ((sys.executable, "-c", "print('hello')"), DaemonUnavailable),
        ((sys.executable, "-c", "import time; time.sleep(60)"), DeadlineExceeded),
    ],
)
def test_a_process_that_never_greets(command, error):
    with rig(7) as made:
        scrubber = filled(made).scrubber(command=command, start_s=0.5)
        with pytest.raises(error):
            asyncio.run(scrubber.run(HOST, bytes_per_second=FAST))
        made.settled()
        assert made.present(*range(20)) == list(range(20))


def test_a_process_that_writes_without_end_to_its_standard_error():
    """It fills neither a pipe nor memory, and is ended like one that says nothing."""
    with rig(8) as made:
        then = 'while True: os.write(2, b"x" * 65536)'
        command = (sys.executable, "-c", LIAR + then)
        scrubber = filled(made).scrubber(command=command, silence_s=0.3)
        with pytest.raises(DeadlineExceeded):
            asyncio.run(scrubber.run(HOST, bytes_per_second=FAST))


def test_a_liar_alone_condemns_nothing():
    """What the process calls corrupt and this one finds whole stays."""
    with rig(9) as made:
        then = """
while True:
    say(whole | {"number": body["number"], "corrupt": [[0, "I say so"]]})
    body = read()
"""
        scrubber = filled(made).scrubber(command=(sys.executable, "-c", LIAR + then))
        report = asyncio.run(scrubber.run(HOST, bytes_per_second=FAST))
        assert (report.counts.pages_done, report.counts.pages_corrupt) == (20, 0)
        assert made.rechecks == 5, "one a batch"
        assert made.present(*range(20)) == list(range(20))


PARENT = """
import asyncio, os
from kvtier.daemon.scrub_process import ScrubProcess
from kvtier.daemon.scrub_protocol import Setup
from kvtier.tiers.direct_file import DirectMode

async def main():
    setup = Setup(parent_pid=os.getpid(), arena_fd=-1, arena_bytes=0, segment_bytes=0,
                  direct=DirectMode.OFF, bytes_per_second=1 << 20)
    process = await ScrubProcess.start(setup)
    print(process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_process_dies_with_the_daemon(is_stopped):
    """Also when it is stopped, and so cannot see that its input has ended."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    with parent:
        pid = int(parent.stdout.readline())
        if is_stopped:
            stop_process(pid)
        parent.kill()
        parent.wait(10)
        asyncio.run(until(lambda: is_gone(pid)))


def test_the_process_goes_on_through_a_ctrl_c():
    with rig(10) as made:
        scrubber = filled(made).scrubber()

        async def main():
            run = await frozen_in_a_batch(made, scrubber)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
                os.kill(scrubber.process_pid, number)
            return await run

        assert asyncio.run(main()).counts.bytes_done == 20 * PAGE


def test_the_process_loads_no_framework():
    code = (
        "import sys, kvtier.daemon.scrub_worker\n"
        "print([name for name in ('torch', 'grpc', 'google.protobuf', 'prometheus_client')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
