"""Work in the middle of other work of the same thread, as the handler of a signal does it.

SIGUSR1, because SIGALRM and its timer belong to the timeouts of the tests: one that comes late
would be taken for a test that takes too long.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["interrupted"]


@contextmanager
def interrupted(work: Callable[[], object], *, pause_s: float) -> Iterator[Callable[[], int]]:
    """Runs `work` in this (the main) thread at any moment, again `pause_s` after it has ended.
    Yields what tells how often it has run.
    """
    runs, main = 0, threading.get_ident()
    is_due, is_over = threading.Event(), threading.Event()

    def handle(*_: object) -> None:
        nonlocal runs
        work()
        runs += 1
        is_due.set()

    def send() -> None:
        while not is_over.is_set():
            if is_due.wait(0.05):
                is_due.clear()
                time.sleep(pause_s)
                signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    sender = threading.Thread(target=send)
    sender.start()
    is_due.set()
    try:
        yield lambda: runs
    finally:
        is_over.set()
        sender.join()
        # What was sent to this thread has come by now, and is handled before this returns.
        signal.signal(signal.SIGUSR1, before)
