"""The serving process: model, pool, connection, engine and listener, and their end on a signal.

The event loop runs in the main thread, the engine in one of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

import kvtier
from kvtier_engine.cache.tiers import KvtierTiers
from kvtier_engine.engine import Engine
from kvtier_engine.errors import InvalidRequest
from kvtier_engine.model.load import LoadedModel, load_model
from kvtier_engine.server.app import App, serving
from kvtier_engine.server.limits import Limits
from kvtier_engine.server.listener import bound, url_of, within_descriptors
from kvtier_engine.server.room import check_device, pool_of
from kvtier_engine.settings import EngineSettings, Integrity, KvCacheDtype, layout_of
from kvtier_engine.smollm2 import MODEL_ID, ensure_model

__all__ = ["run"]

log = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT; 0 then, 1 if the engine did not end in time.

    Raises KvtierError. The address is taken before the model is loaded: who has the wrong one need
    not wait for that.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    kv_cache = _kv_cache(args.kv_cache_dtype, args.dtype)
    check_device(args.device)
    with contextlib.ExitStack() as stack:
        sockets = bound(args.host, args.port)
        for one in sockets:
            stack.enter_context(one)
        return _run(args, kv_cache, sockets)


def _run(args: argparse.Namespace, kv_cache: KvCacheDtype, sockets: Sequence[socket.socket]) -> int:
    model = _model(args.model, getattr(torch, args.dtype), args.device)
    layout = layout_of(model, page_tokens=args.page_tokens, kv_cache=kv_cache)
    pool = pool_of(layout, args.pool_tokens, args.device)
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
        engine = Engine(model, pool, tiers=tiers, settings=settings).start()
        try:
            limits = within_descriptors(Limits())
            asyncio.run(_serve(App(engine, name=args.name, limits=limits), sockets))
        finally:
            is_closed = engine.close()
            if not is_closed:
                # Its thread is in the middle of a pass: what it uses ends with the process.
                stack.pop_all()
    return 0 if is_closed else 1


def _kv_cache(asked: str | None, dtype: str) -> KvCacheDtype:
    """Raises InvalidRequest for bfloat16 pages of a network that computes in another dtype."""
    if asked == "fp8_e4m3":
        return KvCacheDtype.FP8_E4M3
    if asked == "bf16" and dtype != "bfloat16":
        raise InvalidRequest(
            f"--kv-cache-dtype bf16 with --dtype {dtype}",
            remedy="leave --kv-cache-dtype out, ask for fp8_e4m3, or add --dtype bfloat16",
        )
    return KvCacheDtype.AS_COMPUTED


def _model(place: Path | None, dtype: torch.dtype, device: str) -> LoadedModel:
    if place is not None:
        return load_model(place, dtype=dtype, device=device)
    return load_model(ensure_model().directory, dtype=dtype, device=device, name=MODEL_ID)


async def _serve(app: App, sockets: Sequence[socket.socket]) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with serving(app, sockets) as addresses:
        urls = ",".join(f"{url_of(address)}/v1" for address in addresses)
        log.info("engine.ready model=%s url=%s", app.name, urls)
        await ended.wait()
