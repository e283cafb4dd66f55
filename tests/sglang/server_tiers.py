"""A daemon whose pages get to NVMe, and what tests do with a server on it."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server_models import prompt
from server_rig import PAGE, Answer, Server, storable

import kvtier
from kvtier.core.page import Tier
from tests.forks import ForkedDaemon

__all__ = [
    "check_found",
    "comes",
    "comes_back",
    "counters",
    "finds_all",
    "killed",
    "nvme_daemon",
    "stopped",
    "stored",
    "stored_on_nvme",
]

_WAIT_S = 60.0


@contextmanager
def nvme_daemon(forker: Any) -> Iterator[ForkedDaemon]:
    """Its pages are on NVMe as soon as they can be. Its base has the device, `nv`."""
    settings = ("host.bytes=256MiB", "nvme.bytes=512MiB", "nvme.write_policy=through")
    base = Path(tempfile.mkdtemp(prefix="kvt-"))
    try:
        with ForkedDaemon(forker, base, f"nvme.paths={base / 'nv'}", *settings) as running:
            yield running
    finally:
        shutil.rmtree(base, ignore_errors=True)


def comes(call: Callable[[], bool], seconds: float = _WAIT_S) -> None:
    """Returns when `call` says so."""
    until = time.monotonic() + seconds
    while not call():
        assert time.monotonic() < until
        time.sleep(0.05)


def stored(server: Server, text: str, **options: Any) -> Answer:
    """The answer to a prompt that nobody has asked before; its pages are in storage then."""
    cold = server.generate(text, **options)
    assert cold.found == {}
    server.flush()
    return cold


def check_found(server: Server, text: str, cold: Answer, tokens: int, **options: Any) -> None:
    """The prompt again: so many tokens from storage, none from elsewhere, and the same text."""
    again = server.generate(text, **options)
    assert (again.text, again.found) == (cold.text, {"storage": tokens} if tokens else {})
    server.flush()


def finds_all(server: Server, text: str) -> bool:
    """Whether the prompt comes from storage as far as it can."""
    answer = server.generate(text)
    server.flush()
    return answer.found == {"storage": storable(answer)}


def counters(daemon: ForkedDaemon) -> dict[str, int]:
    """The daemon's own."""
    with kvtier.connect(daemon.url, deadline=10) as kv:
        return dict(kv.status(deadline=10).counters)


def comes_back(server: Server, name: str) -> None:
    """Until the server has found the daemon again, with prompts of its own."""
    comes(lambda: finds_all(server, prompt(f"{name} again", 2)))


def stored_on_nvme(server: Server, daemon: ForkedDaemon, text: str, *, ranks: int = 1) -> Answer:
    """As `stored`; returns when K and V of each page, of each rank, have been copied down."""
    before = _on_nvme(daemon)
    cold = stored(server, text)
    comes(lambda: _on_nvme(daemon) >= before + 2 * ranks * storable(cold) // PAGE)
    return cold


@contextmanager
def killed(daemon: ForkedDaemon) -> Iterator[None]:
    """It is started again at the end."""
    daemon.kill()
    try:
        yield
    finally:
        daemon.start()


@contextmanager
def stopped(daemon: ForkedDaemon) -> Iterator[None]:
    """It goes on at the end."""
    daemon.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.signal(signal.SIGCONT)


def _on_nvme(daemon: ForkedDaemon) -> int:
    """How many objects are there."""
    with kvtier.connect(daemon.url, deadline=10) as kv:
        return next(
            tier.pages_sealed for tier in kv.status(deadline=10).tiers if tier.tier is Tier.NVME
        )
