"""Work that hangs until it is let go, and scenarios that end in any case."""

from __future__ import annotations

import asyncio
import threading

SOON_S = 10.0


class Gate:
    """Work that hangs until it is let go."""

    def __init__(self):
        self.started = threading.Event()
        self._open = threading.Event()

    def __call__(self):
        self.started.set()
        assert self._open.wait(SOON_S), "nobody let the job go"
        return "went on"

    def let_go(self):
        self._open.set()


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario(), 3 * SOON_S))
