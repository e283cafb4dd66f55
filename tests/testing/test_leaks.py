"""Every kind of thing that can be left behind is planted and found, by name."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtier.testing.leaks import LeakError, Snapshot, leaks_since, no_leaks
from kvtier.tiers.host import HostArena
from tests.testing.inner_pytest import outcomes, run_pytest

SHORT_S = 0.05


def left_by(plant, *directories):
    """What is reported after `plant()`, with little patience."""
    before = Snapshot.take(directories)
    plant()
    return leaks_since(before, directories=directories, grace_s=SHORT_S)


def test_nothing_left_is_nothing_reported():
    began = time.monotonic()
    with no_leaks():
        os.close(os.open("/dev/null", os.O_RDONLY))
        HostArena(1 << 20).close()
    assert time.monotonic() - began < 1.0


def test_a_descriptor():
    opened = []
    found = left_by(lambda: opened.append(os.open("/dev/null", os.O_RDONLY)))
    os.close(opened[0])
    assert found == [f"descriptor {opened[0]} -> /dev/null"]


def test_sockets():
    pair = []
    found = left_by(lambda: pair.extend(socket.socketpair()))
    for end in pair:
        end.close()
    assert len(found) == 2
    assert all(" -> socket:[" in words for words in found)


def test_a_descriptor_number_used_again():
    """Closed and opened as something else: still a leak."""
    first = os.open("/dev/null", os.O_RDONLY)

    def swap():
        os.close(first)
        assert os.open("/dev/zero", os.O_RDONLY) == first

    found = left_by(swap)
    os.close(first)
    assert found == [f"descriptor {first} -> /dev/zero"]


def test_a_thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left over", daemon=True)
    found = left_by(thread.start)
    stop.set()
    thread.join()
    assert found == ["thread 'left over' (daemon=True)"]


def test_a_thread_that_ends_in_time_is_no_leak():
    with no_leaks(grace_s=5.0):
        threading.Thread(target=time.sleep, args=(0.1,)).start()


def test_a_child_process():
    children = []
    found = left_by(lambda: children.append(subprocess.Popen(["sleep", "30"])))
    children[0].kill()
    children[0].wait()
    assert found == [f"child process {children[0].pid} (state S) sleep 30"]


def test_a_child_nobody_waited_for():
    pids = []

    def plant():
        pids.append(os.posix_spawn("/bin/true", ["true"], {}))
        os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)

    found = left_by(plant)
    os.waitpid(pids[0], 0)
    assert found == [f"child process {pids[0]} (state Z)"]


def test_a_child_from_before_that_changes_is_no_leak():
    child = subprocess.Popen(["sleep", "30"])
    before = Snapshot.take()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert leaks_since(before, grace_s=SHORT_S) == []
    child.wait()


def test_an_arena_left_open():
    arenas = []
    found = left_by(lambda: arenas.append(HostArena(1 << 20, huge_pages=False)))
    arenas.pop().close()
    assert len(found) == 3
    assert [words.split()[0] for words in found] == ["descriptor", "descriptor", "memory"]
    assert all("/memfd:kvtier-arena" in words for words in found)


def test_a_view_of_a_closed_arena():
    views = []

    def plant():
        with HostArena(1 << 20, huge_pages=False) as arena:
            views.append(arena.view(0, 0, 1))

    found = left_by(plant)
    views.clear()
    assert "memory map of /memfd:kvtier-arena" in "\n".join(found)


def test_a_temporary_file(tmp_path):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    path = below / "page.tmp"
    found = left_by(lambda: (below / "kept").touch() or path.touch(), tmp_path)
    path.unlink()
    assert found == [f"temporary file {path}"]


def test_a_name_in_dev_shm():
    path = Path(f"/dev/shm/kvtier-test-{os.getpid()}")
    found = left_by(path.touch)
    path.unlink()
    assert found == [f"shared memory {path}"]


def test_a_semaphore_of_another_program_is_not_ours():
    path = Path(f"/dev/shm/sem.kvtier-test-{os.getpid()}")
    found = left_by(path.touch)
    path.unlink()
    assert found == []


SHM_USER = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    pages = mmap.mmap(file.fileno(), 4096)
print("ready", flush=True)
sys.stdin.read()
"""


def test_shared_memory_of_another_process_is_not_ours():
    path = Path(f"/dev/shm/kvtier-other-{os.getpid()}")
    before = Snapshot.take()
    command = [sys.executable, "-c", SHM_USER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"ready\n"
        found = leaks_since(before, grace_s=SHORT_S)
    path.unlink()
    assert [words for words in found if "shared memory" in words] == []


def test_garbage_in_a_cycle_is_no_leak():
    with no_leaks():
        memory = os.memfd_create("cycle")
        os.ftruncate(memory, 4096)
        holder = [mmap.mmap(memory, 4096)]
        os.close(memory)
        holder.append(holder)
        del holder


def test_the_block_form_raises_and_names_all():
    opened = []
    with pytest.raises(LeakError) as caught, no_leaks(grace_s=SHORT_S):
        opened.extend(os.open(path, os.O_RDONLY) for path in ("/dev/null", "/dev/zero"))
    for number in opened:
        os.close(number)
    assert str(caught.value).splitlines() == [
        "left behind:",
        *sorted(
            f"  descriptor {number} -> {path}"
            for number, path in zip(opened, ("/dev/null", "/dev/zero"), strict=True)
        ),
    ]


def test_an_exception_goes_before_leaks():
    opened = []

    def fail():
        opened.append(os.open("/dev/null", os.O_RDONLY))
        raise KeyError

    with pytest.raises(KeyError), no_leaks(grace_s=SHORT_S):
        fail()
    os.close(opened[0])


PLUGIN_TESTS = """
    import os, threading
    import pytest
    from kvtier.testing import leaks

    leaks.leaks_since.__kwdefaults__["grace_s"] = 0.5  # what is left here is left for good

    def test_clean(tmp_path):
        (tmp_path / "file").touch()

    def test_leaky(tmp_path):
        os.open("/dev/null", os.O_RDONLY)
        threading.Thread(target=threading.Event().wait, name="stray", daemon=True).start()
        (tmp_path / "x.tmp").touch()

    @pytest.mark.leaks_allowed("to see that it can be")
    def test_allowed():
        os.open("/dev/null", os.O_RDONLY)

    @pytest.fixture
    def tidy():
        number = os.open("/dev/null", os.O_RDONLY)
        yield
        os.close(number)

    def test_a_fixture_that_cleans_up(tidy):
        pass
"""


def test_the_plugin(tmp_path):
    done = run_pytest(tmp_path, PLUGIN_TESTS, "-p", "kvtier.testing.leaks", "--strict-markers")
    assert outcomes(done, "ERROR") == {"test_leaky"}, done.stdout + done.stderr
    assert outcomes(done, "PASSED") == {
        "test_leaky",
        "test_clean",
        "test_allowed",
        "test_a_fixture_that_cleans_up",
    }
    assert "-> /dev/null" in done.stdout
    assert "thread 'stray' (daemon=True)" in done.stdout
    assert "/x.tmp" in done.stdout
