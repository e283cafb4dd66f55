"""`kvtier verify`: a running daemon reads its pages and checks every byte.

Exit code 1 when pages were corrupt (`kvtier quarantine` has their bytes) or unreadable, which are
then out of use; 0 when there were none. How far it has come goes to standard error: a bar on a
terminal, else a line every few seconds. What it came to goes to standard output.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, Final, TextIO

from kvtier.cli.options import add_url, connected
from kvtier.config.kinds import Size

if TYPE_CHECKING:
    from kvtier.transfer.planes.values import VerifyProgress

__all__ = ["register"]

EXIT_CORRUPT = 1
_ALL = "all"
_TIERS = ("host", "nvme")
_RATE = Size(low=1, high=1 << 62)
_SILENCE_S = 120.0


def register(commands: Any) -> None:
    """Adds `kvtier verify`."""
    parser = commands.add_parser(
        "verify", help="have a daemon check the bytes of its pages", description=__doc__
    )
    add_url(parser)
    parser.set_defaults(timeout=_SILENCE_S)
    parser.add_argument(
        "--tier", choices=(*_TIERS, _ALL), default=_ALL, help="default: every tier there is"
    )
    parser.add_argument(
        "--rate",
        type=_rate,
        default=0,
        metavar="SIZE",
        help="bytes a second, as in 100MB (else as the daemon is configured)",
    )
    parser.set_defaults(run=_run)


def _rate(text: str) -> int:
    try:
        return _RATE.parse_text(text)
    except ValueError as error:
        message = f"{text!r}: {error}; allowed: {_RATE.allowed}"
        raise argparse.ArgumentTypeError(message) from None


def _run(arguments: argparse.Namespace) -> int:
    bad = 0
    with connected(arguments) as connection:
        tiers = [arguments.tier]
        if arguments.tier == _ALL:
            there = {tier.name.lower() for tier in connection.capabilities().tiers}
            tiers = [name for name in _TIERS if name in there]
        for name in tiers:
            display = _Display(name, sys.stderr)
            try:
                found = connection.verify(
                    name,
                    bytes_per_second=arguments.rate,
                    on_progress=display.show,
                    deadline=arguments.timeout,
                )
            finally:
                display.close()
            bad += found.pages_corrupt + found.pages_unreadable
            print(
                f"{name:5} {found.pages_done} pages, {_mib(found.bytes_done)}, "
                f"{found.pages_corrupt} corrupt, {found.pages_unreadable} unreadable",
                flush=True,
            )
    return EXIT_CORRUPT if bad else 0


class _Display:
    """How far one tier is. One thread."""

    _BAR_CHARS: Final = 24
    _BAR_EVERY_S: Final = 0.1
    _LINE_EVERY_S: Final = 5.0
    _CLEAR: Final = "\r\x1b[K"

    def __init__(self, tier: str, stream: TextIO) -> None:
        self._tier = tier
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._began = time.monotonic()
        self._next_at = 0.0 if self._is_terminal else self._began + self._LINE_EVERY_S
        self._is_shown = False

    def show(self, progress: VerifyProgress) -> None:
        now = time.monotonic()
        if now < self._next_at:
            return
        every_s = self._BAR_EVERY_S if self._is_terminal else self._LINE_EVERY_S
        self._next_at = now + every_s
        text = self._text(progress, now - self._began)
        if self._is_terminal:
            text = text[: shutil.get_terminal_size().columns - 1]
            print(f"{self._CLEAR}{text}", end="", file=self._stream, flush=True)
            self._is_shown = True
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._is_shown:
            print(self._CLEAR, end="", file=self._stream, flush=True)

    def _text(self, progress: VerifyProgress, took_s: float) -> str:
        # Pages come and go meanwhile: the total is what was there at the beginning.
        share = (
            min(progress.pages_done / progress.pages_total, 1.0) if progress.pages_total else 1.0
        )
        pace = progress.bytes_done / took_s if took_s > 0 else 0.0
        bar = ""
        if self._is_terminal:
            full = int(share * self._BAR_CHARS)
            bar = f"[{'#' * full}{'-' * (self._BAR_CHARS - full)}] "
        return (
            f"{self._tier:5} {bar}{share:4.0%}  {progress.pages_done}/{progress.pages_total} pages"
            f"  {_mib(progress.bytes_done)}  {_mib(pace)}/s  {progress.pages_corrupt} corrupt"
        )


def _mib(count: float) -> str:
    return f"{count / (1 << 20):,.1f} MiB"
