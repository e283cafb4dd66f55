"""The engine's side of the device tier: paged KV with tags, and its way to the service and back.

    pool = DevicePool(ns.layout, 1024, "cuda")
    table, tracker = PageTable(pool), TagTracker(pool)
    table.append(pool.allocate(len(keys)))
    with PageTransfer(pool, ns) as transfer:
        got = transfer.load(keys, table.ids)            # got.failed are to be computed
        sound = tracker.verify([table])                 # before each decode step
        under_way = transfer.start_offload(keys, table.ids)
        table.release()                                 # given to others when it has been read

Needs torch, which nothing else of the client does; without it importing this raises MissingExtra.
"""

from __future__ import annotations

from kvtier.client.device import _needs_torch as _needs_torch  # isort: split

from kvtier.client.device.account import Occupancy
from kvtier.client.device.arrivals import LayeredLoad
from kvtier.client.device.errors import (
    PageNotHeld,
    PoolExhausted,
    PoolInconsistent,
    PoolNameTaken,
)
from kvtier.client.device.form import FP8_COMPUTE, PageForm, fp8_layout
from kvtier.client.device.outcomes import LoadResult, OffloadResult, Transfer
from kvtier.client.device.pool import NO_TAG, DevicePool
from kvtier.client.device.reporter import PoolReporter
from kvtier.client.device.table import PageTable
from kvtier.client.device.tags import NoopTracker, TagTracker, Tracker
from kvtier.client.device.transfer import PageTransfer

__all__ = [
    "FP8_COMPUTE",
    "NO_TAG",
    "DevicePool",
    "LayeredLoad",
    "LoadResult",
    "NoopTracker",
    "Occupancy",
    "OffloadResult",
    "PageForm",
    "PageNotHeld",
    "PageTable",
    "PageTransfer",
    "PoolExhausted",
    "PoolInconsistent",
    "PoolNameTaken",
    "PoolReporter",
    "TagTracker",
    "Tracker",
    "Transfer",
    "fp8_layout",
]
