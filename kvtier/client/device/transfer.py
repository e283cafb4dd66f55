"""PageTransfer: pool pages to the service and back, in the background or while the caller waits.

Promise: one outcome a page, within the deadline, also with the daemon absent, killed or stopped. A
page of a transfer is pinned in the pool from the call on until nothing of it touches the page any
more: `free` of it is deferred until then, so nobody gets a page that is still read or written. A
page that is no hit may hold anything afterwards (of a pool in host memory) and is the caller's to
compute.

Offloads are done one after another in one thread, loads in another, so that no load waits for an
offload. Methods may be called from any thread; on CUDA from the one whose current stream made the
pages, or read them last. In a forked child they raise ForkedClient.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from kvtier.client.aio import DEADLINE_S
from kvtier.client.arguments import GetArguments, PutArguments
from kvtier.client.device.arrivals import Arrivals, LayeredLoad
from kvtier.client.device.moving import Lane, LoadOrder, OffloadOrder, Pinned
from kvtier.client.device.outcomes import LoadResult, OffloadResult, Transfer
from kvtier.client.device.pool import DevicePool
from kvtier.client.device.streams import CopyStream, stream_for
from kvtier.client.keys import KeyChain, checked_keys
from kvtier.client.sync import Namespace
from kvtier.core.page import Codec, GetCode, PutCode
from kvtier.errors import ClientClosed, ForkedClient, LayoutError, LimitExceeded, PageSizeError
from kvtier.transfer.planes.deadline import Deadline

if TYPE_CHECKING:
    from typing import Unpack

__all__ = ["PageTransfer"]

R = TypeVar("R")

_QUEUE_TRANSFERS_MAX: Final = 64
_STAGING_BYTES_MAX: Final = 128 << 20
#: How much longer than its deadline a call waits for copies that the device has begun.
_OVERRUN_S: Final = 2.0


class PageTransfer:
    """Between `pool` and `namespace`, which must have one layout (else LayoutError).

    `queue_transfers_max` transfers a direction may wait or be under way; one more comes to BUSY at
    once. `staging_bytes_max` of page-locked memory a direction, of pools that are not in host
    memory. `deadline` in seconds, of calls that name none. Close it, or use it in a `with`.
    """

    def __init__(
        self,
        pool: DevicePool,
        namespace: Namespace,
        *,
        deadline: float = DEADLINE_S,
        queue_transfers_max: int = _QUEUE_TRANSFERS_MAX,
        staging_bytes_max: int = _STAGING_BYTES_MAX,
        stream: CopyStream | None = None,
    ) -> None:
        difference = pool.layout.difference(namespace.layout)
        if difference is not None:
            raise LayoutError(
                f"the pool's layout and the namespace's differ in {difference}",
                remedy="open the namespace with pool.layout",
            )
        self.pool = pool
        self.namespace = namespace
        self._deadline_s = deadline
        self._offloads, self._loads = (
            _Queue(
                # A stream each: a GPU copies in both directions at once.
                Lane(
                    pool,
                    namespace,
                    stream or stream_for(pool.device),
                    staging_bytes_max=staging_bytes_max,
                ),
                name,
                queue_transfers_max,
            )
            for name in ("kvtier-offload", "kvtier-load")
        )
        self._pid = os.getpid()

    def __enter__(self) -> PageTransfer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def offload(
        self, keys: Sequence[bytes], ids: Sequence[int], **options: Unpack[PutArguments]
    ) -> OffloadResult:
        """Stores pages `ids` under `keys`, and waits. Options are those of `Namespace.put`
        (`codec=Codec.FP8` packs them). Raises as `start_offload`, and DeadlineExceeded when the
        device does not end a copy.
        """
        return self._waited(self.start_offload(keys, ids, **options), options.get("deadline"))

    def load(
        self, keys: Sequence[bytes], ids: Sequence[int], **options: Unpack[GetArguments]
    ) -> LoadResult:
        """Fills pages `ids` with what is stored under `keys`, and waits. Options are those of
        `Namespace.get` (`lossy_ok=True` takes fp8 copies). Raises as `offload`.
        """
        return self._waited(self.start_load(keys, ids, **options), options.get("deadline"))

    def start_offload(
        self, keys: Sequence[bytes], ids: Sequence[int], **options: Unpack[PutArguments]
    ) -> Transfer[OffloadResult]:
        """Begins an offload. Do not write to the pages before it is done; freeing them is fine.

        Raises PageNotHeld, PageSizeError (ids that are not one a key), KeyLengthError, LayoutError,
        ClientClosed, ForkedClient.
        """
        deadline = self._begun(keys, ids, options.get("deadline"))
        self.pool.layout.payload_bytes(options.get("codec", Codec.RAW))
        order = OffloadOrder(
            keys=_chained(keys, options),
            ids=tuple(ids),
            after=self._offloads.lane.mark(),
            deadline=deadline,
            options=options,
            pinned=Pinned(self.pool, ids),
        )
        queue = self._offloads

        def all_came_to(code: GetCode) -> OffloadResult:
            return OffloadResult.of_all(len(order.ids), PutCode[code.name])

        return Transfer(
            queue.start(lambda: queue.lane.offload(order), order.pinned, all_came_to), all_came_to
        )

    def start_load(
        self, keys: Sequence[bytes], ids: Sequence[int], **options: Unpack[GetArguments]
    ) -> Transfer[LoadResult]:
        """Begins a load. Do not use the pages before it is done; freeing them is fine. Raises as
        `start_offload`.
        """
        order, all_came_to = self._load_order(keys, ids, options, None)
        queue = self._loads
        return Transfer(
            queue.start(lambda: queue.lane.load(order), order.pinned, all_came_to), all_came_to
        )

    def start_layered_load(
        self, keys: Sequence[bytes], ids: Sequence[int], **options: Unpack[GetArguments]
    ) -> LayeredLoad:
        """As `start_load`, and the pages may be used layer by layer before it is done, see
        LayeredLoad. With more pages than half of the staging memory holds, the last of them only
        are still on their way then.
        """
        arrivals = Arrivals()
        order, all_came_to = self._load_order(keys, ids, options, arrivals)
        queue = self._loads
        return LayeredLoad(
            queue.start(lambda: queue.lane.load(order), order.pinned, all_came_to),
            all_came_to,
            arrivals,
        )

    def _load_order(
        self,
        keys: Sequence[bytes],
        ids: Sequence[int],
        options: GetArguments,
        arrivals: Arrivals | None,
    ) -> tuple[LoadOrder, Callable[[GetCode], LoadResult]]:
        order = LoadOrder(
            deadline=self._begun(keys, ids, options.get("deadline")),
            keys=checked_keys(keys),
            ids=tuple(ids),
            after=self._loads.lane.mark(),
            options=options,
            arrivals=arrivals,
            pinned=Pinned(self.pool, ids),
        )
        return order, lambda code: LoadResult.of_all(len(order.ids), code)

    def close(self) -> None:
        """Drops what has not begun (its pages come to UNAVAILABLE) and waits for what has, which
        keeps to its deadline. Closing twice is no error.
        """
        if self._pid == os.getpid():
            self._offloads.close()
            self._loads.close()

    def _begun(self, keys: Sequence[bytes], ids: Sequence[int], seconds: float | None) -> Deadline:
        """Looks at what every transfer has. The deadline begins here: waiting in line counts."""
        if self._pid != os.getpid():
            raise ForkedClient(
                "a transfer of the parent process", remedy="connect anew in the child process"
            )
        if len(keys) != len(ids) or len(set(ids)) != len(ids):
            raise PageSizeError(
                f"{len(keys)} keys and {len(set(ids))} different pages",
                remedy="pass one page of the pool for each key",
            )
        wanted = self._deadline_s if seconds is None else seconds
        if not wanted >= 0:
            raise LimitExceeded(f"deadline is {wanted!r}", remedy="pass seconds, 0 or more")
        return Deadline.after(wanted)

    def _waited(self, transfer: Transfer[R], seconds: float | None) -> R:
        return transfer.wait_or_drop(self._deadline_s if seconds is None else seconds, _OVERRUN_S)


class _Queue:
    """A thread with a lane of its own, and a bound to what waits for it."""

    def __init__(self, lane: Lane, name: str, transfers_max: int) -> None:
        self.lane = lane
        self._lock = threading.Lock()
        self._is_closed = False
        self._room = threading.BoundedSemaphore(transfers_max)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        # The thread begins here: where a process may have no more of them the executor raises with
        # the work in its queue, and would do it later, over pages that are no longer pinned.
        self._executor.submit(os.getpid).result()

    def start(
        self, work: Callable[[], R], pinned: Pinned, all_came_to: Callable[[GetCode], R]
    ) -> Future[R]:
        """Runs `work` when those before it are done; BUSY where there is no room to wait."""
        try:
            return self._queued(work, pinned, all_came_to)
        except BaseException:
            pinned.release_all()
            raise

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _queued(
        self, work: Callable[[], R], pinned: Pinned, all_came_to: Callable[[GetCode], R]
    ) -> Future[R]:
        with self._lock:
            if self._is_closed:
                raise ClientClosed("the transfer is closed", remedy="make a new one")
            if not self._room.acquire(blocking=False):
                pinned.release_all()
                refused: Future[R] = Future()
                refused.set_result(all_came_to(GetCode.BUSY))
                return refused
            future = self._executor.submit(self._done, work)
        future.add_done_callback(lambda ended: self._dropped(ended, pinned))
        return future

    def _done(self, work: Callable[[], R]) -> R:
        try:
            return work()
        finally:
            self._room.release()  # before anybody hears that it is done

    def _dropped(self, ended: Future[R], pinned: Pinned) -> None:
        if ended.cancelled():
            self._room.release()
            pinned.release_all()


def _chained(keys: Sequence[bytes], options: PutArguments) -> Sequence[bytes]:
    """The keys as a chain, so that its parts go on from each other; `options` loses what the chain
    says. As they are with `chain=False`.
    """
    checked = checked_keys(keys)
    if not options.get("chain", True):
        return checked
    parent, depth = options.pop("parent", None), options.pop("depth", None)
    if isinstance(keys, KeyChain):
        parent = keys.parent if parent is None else parent
        depth = keys.depth if depth is None else depth
    return KeyChain(checked, parent=parent or b"", depth=depth or 0)
