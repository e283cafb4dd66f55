"""Kind 16, DISKFULL, something that is no file in the place of a file: fsck says 3 exactly when the
daemon does not start, and both name the cause and what to remove.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_rig import GetCode, Pages

from kvtier.cli import main
from kvtier.testing.daemon_process import DaemonNotReady

PAGES = Pages(5_000)
NUMBERS = range(20)


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


KINDS: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "directory": Path.mkdir,
    "socket": make_socket,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
}

# What lies where, and whether a daemon starts with it.
CASES = [
    ("state/journal-0000000099", "fifo", False),
    ("state/journal-0000000099", "directory", False),
    ("state/checkpoint", "fifo", False),
    ("state/checkpoint.old", "directory", True),
    ("state/format", "socket", False),
    ("state/namespaces", "endless", False),
    ("state/generations", "loop", False),
    ("state/geometry", "directory", False),
    ("state/journals", "directory", False),
    ("state/namespaces.tmp", "directory", False),
    ("state/lock", "fifo", False),
    ("nv/device", "fifo", False),
    ("nv/device", "directory", False),
    ("nv/device.tmp", "directory", True),
    ("nv/segment-00000009", "endless", True),
]


@pytest.mark.parametrize(("place", "kind", "starts"), CASES)
def test_fsck_and_the_start_agree(make_daemon, connect, base, capsys, place, kind, starts):
    daemon = make_daemon("nvme.bytes=8MiB").start()
    ns = connect(daemon).namespace(PAGES.layout)
    PAGES.put(ns, NUMBERS)
    daemon.stop()
    path = base / place
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    code = main(["fsck", str(daemon.directory)])
    said = "".join(capsys.readouterr())
    if starts:
        assert code in (0, 1), said
        daemon.start()
        ns = connect(daemon).namespace(PAGES.layout)
        assert PAGES.get(ns, NUMBERS) == [GetCode.HIT] * len(NUMBERS)
        return
    assert code == 3, said
    assert f"emove {path}" in said or "Remove it" in said, said
    with pytest.raises(DaemonNotReady) as caught:
        daemon.start()
    remedy = next(line for line in str(caught.value).splitlines() if line.startswith("remedy: "))
    assert remedy.startswith("remedy: Remove "), remedy
    assert str(path) in str(caught.value)
