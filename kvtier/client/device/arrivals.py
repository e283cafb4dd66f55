"""A load whose layers arrive one after the other, so that the first ones are computed meanwhile.

Promise: its outcome is known, page by page, when every page has been verified in host memory and
all copies to the device are queued. From then on `hold(layer)` orders what the caller does behind
the copy of that layer. The pages stay pinned until every copy has ended.

`tell` is the lane's; `arrived` and `hold` belong to the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvtier.client.device.outcomes import LoadResult, Transfer
from kvtier.client.device.streams import Fence
from kvtier.core.page import GetCode

__all__ = ["Arrivals", "LayeredLoad"]


class Arrivals:
    """What a lane says of a load before it is done."""

    def __init__(self) -> None:
        self._told: tuple[LoadResult, Sequence[Fence]] | None = None

    def tell(self, result: LoadResult, fences: Sequence[Fence]) -> None:
        """`fences[layer]` is reached when that layer is there; none: all are there already."""
        self._told = result, fences

    @property
    def result(self) -> LoadResult | None:
        return None if self._told is None else self._told[0]

    def hold(self, layer: int) -> None:
        if self._told is not None and self._told[1]:
            self._told[1][layer].hold()


class LayeredLoad(Transfer[LoadResult]):
    """A Transfer (`wait` and `poll` are of the whole) that can be used from its first layer on."""

    def __init__(
        self,
        future: Future[LoadResult],
        all_came_to: Callable[[GetCode], LoadResult],
        arrivals: Arrivals,
    ) -> None:
        super().__init__(future, all_came_to)
        self._arrivals = arrivals

    def arrived(self) -> LoadResult | None:
        """The outcome, None while it is not known. Hits may still be on their way: `hold` before a
        layer of them is read. Raises as `poll`.
        """
        if self.is_done:
            return self.poll()
        return self._arrivals.result

    def hold(self, layer: int) -> None:
        """What this thread queues on the device from now on comes after the copy of `layer`. Of a
        pool in host memory it returns when that copy has been made.
        """
        self._arrivals.hold(layer)
