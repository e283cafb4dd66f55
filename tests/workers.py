"""A worker of pytest-xdist that has died ends the run, also when a process that it had forked lives
on: that one holds the pipes on whose end xdist waits, for as long as it lives.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

#: How long xdist may take to see for itself that a worker has ended.
_GRACE_S = 10.0
_END_S = 60.0


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node) -> None:
    threading.Thread(target=_watch, args=(node.gateway,), name="watch worker", daemon=True).start()


def _watch(gateway) -> None:
    gateway._io.popen.wait()
    until = time.monotonic() + _GRACE_S
    while gateway.hasreceiver():
        if time.monotonic() > until:
            sys.stderr.write(f"\nworker {gateway.id} has died and something holds its pipes\n")
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(_END_S)
            os._exit(3)
        time.sleep(0.1)
