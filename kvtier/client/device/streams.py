"""The order of copies between a pool and host memory, on the device that does them.

A *mark* is a point in the work that the engine has queued; a *fence* is the end of a copy. Both are
waited for by the host, in the thread that moves pages, so that no kernel of the engine waits for a
copy and no copy begins before the kernels that made, or still read, its pages have ended.

`submit` belongs to one thread at a time, `mark` to the engine's; fences may be asked by any.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

import torch

from kvtier.transfer.planes.deadline import Deadline

__all__ = ["CopyStream", "CudaStream", "Fence", "HostStream", "stream_for"]

_POLL_S_MIN: Final = 20e-6
_POLL_S_MAX: Final = 1e-3


class Fence(Protocol):
    def wait(self, deadline: Deadline | None = None) -> bool:
        """Returns when it is reached; False when the deadline comes first."""

    def hold(self) -> None:
        """What the calling thread does on the device from now on begins when it is reached. The
        host does not wait, but for a device that is the host.
        """


class CopyStream(Protocol):
    @property
    def is_direct(self) -> bool:
        """Whether the host may read and write pool pages in place; then nothing is submitted."""

    def mark(self) -> Fence:
        """Reached when all that the calling thread has queued on the device so far is done."""

    def submit(self, copy: Callable[[], None]) -> Fence:
        """Queues what `copy` does on the device behind the copies before it."""


class HostStream:
    """A pool in host memory: what was called has been done."""

    is_direct = True

    def mark(self) -> Fence:
        return _Reached()

    def submit(self, copy: Callable[[], None]) -> Fence:
        copy()
        return _Reached()


class CudaStream:
    """Copies on a CUDA stream of their own, beside the engine's kernels."""

    is_direct = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Fence:
        return _CudaFence(torch.cuda.current_stream(self._device))

    def submit(self, copy: Callable[[], None]) -> Fence:
        with torch.cuda.stream(self._stream):
            copy()
        return _CudaFence(self._stream)


class _Reached:
    def wait(self, deadline: Deadline | None = None) -> bool:
        return True

    def hold(self) -> None:
        return


class _CudaFence:
    """An event at the present end of a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self, deadline: Deadline | None = None) -> bool:
        # An event has no wait with a limit; asking it costs a microsecond.
        pause = _POLL_S_MIN
        while not self._event.query():  # type: ignore[no-untyped-call]
            if deadline is not None and deadline.has_passed:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S_MAX)
        return True

    def hold(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


def stream_for(device: torch.device) -> CopyStream:
    """How pages of a pool on this device are copied."""
    return CudaStream(device) if device.type == "cuda" else HostStream()
