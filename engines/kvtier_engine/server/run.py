"""The serving process: model, pool, connection, engine and listener, and their end on a signal.

The event loop runs in the main thread, the engine in one of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
from pathlib import Path

import torch

import kvtier
from kvtier.client.device import DevicePool
from kvtier_engine.cache.tiers import KvtierTiers
from kvtier_engine.engine import Engine
from kvtier_engine.model.load import LoadedModel, load_model
from kvtier_engine.server.app import App, listen
from kvtier_engine.settings import EngineSettings, Integrity, layout_of
from kvtier_engine.smollm2 import MODEL_ID, ensure_model

__all__ = ["run"]

log = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT; 0 then. Raises KvtierError, OSError for the address."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    model = _model(args.model, getattr(torch, args.dtype), args.device)
    pages = -(-args.pool_tokens // args.page_tokens)
    pool = DevicePool(layout_of(model, page_tokens=args.page_tokens), pages, args.device)
    settings = EngineSettings(
        queue_requests_max=args.queue_requests_max,
        running_requests_max=args.running_requests_max,
        integrity=Integrity(args.kv_integrity),
    )
    with contextlib.ExitStack() as stack:
        tiers = None
        if args.kvtier:
            kvtier.warm_up()
            connection = stack.enter_context(kvtier.connect(args.kvtier))
            tiers = KvtierTiers(connection, pool, tenant=args.tenant)
            stack.callback(tiers.close)
        engine = stack.enter_context(Engine(model, pool, tiers=tiers, settings=settings))
        asyncio.run(_serve(App(engine, name=args.name), args.host, args.port))
    return 0


def _model(place: Path | None, dtype: torch.dtype, device: str) -> LoadedModel:
    if place is not None:
        return load_model(place, dtype=dtype, device=device)
    return load_model(ensure_model().directory, dtype=dtype, device=device, name=MODEL_ID)


async def _serve(app: App, host: str, port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    server = await listen(app, host, port)
    address = server.sockets[0].getsockname()
    log.info("engine.ready model=%s url=http://%s:%d/v1", app.name, address[0], address[1])
    await ended.wait()
    # Those who wait for an answer get none: the engine is closed next, and tells them so.
    server.close()
