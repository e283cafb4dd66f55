"""HeldStream: device copies that happen when a test says so.

It stands for a device whose copies take their time: pages go through staging memory as on a GPU,
and a copy reads and writes at its release, not when it was queued. Safe from any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvtier.transfer.planes.deadline import Deadline

__all__ = ["HeldStream"]


class HeldStream:
    """A CopyStream. `is_holding` False lets copies happen at once, as does `let_go`."""

    is_direct = False

    def __init__(self, *, is_holding: bool = True) -> None:
        self._changed = threading.Condition()
        self._is_holding = is_holding
        self._copies: deque[tuple[Callable[[], None], _Flag]] = deque()
        self._mark = _Flag()
        self._mark.set()

    def mark(self) -> _Flag:
        """The engine's work so far: done, unless `hold_work` was called."""
        return self._mark

    def hold_work(self) -> _Flag:
        """From now on marks are reached when the flag that this returns is set."""
        self._mark = _Flag()
        return self._mark

    def submit(self, copy: Callable[[], None]) -> _Flag:
        flag = _Flag()
        with self._changed:
            self._copies.append((copy, flag))
            self._changed.notify_all()
            if not self._is_holding:
                self._run_all()
        return flag

    def wait_for_copies(self, count: int, timeout_s: float = 20.0) -> None:
        """Returns when so many copies are held. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._copies) >= count, timeout_s):
                raise TimeoutError(f"{len(self._copies)} of {count} copies")

    @property
    def held(self) -> int:
        """Copies that wait."""
        with self._changed:
            return len(self._copies)

    def release_one(self) -> None:
        """The copy that has waited longest happens now, in this thread."""
        with self._changed:
            copy, flag = self._copies.popleft()
            copy()
            flag.set()

    def let_go(self) -> None:
        """All copies happen now, and later ones at once."""
        with self._changed:
            self._is_holding = False
            self._run_all()

    def _run_all(self) -> None:
        while self._copies:
            copy, flag = self._copies.popleft()
            copy()
            flag.set()


class _Flag:
    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self, deadline: Deadline | None = None) -> bool:
        return self._event.wait(None if deadline is None else _left(deadline))

    def hold(self) -> None:
        self._event.wait()


def _left(deadline: Deadline) -> float:
    return 0.0 if deadline.has_passed else deadline.remaining()
