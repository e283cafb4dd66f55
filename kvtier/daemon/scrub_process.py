"""The daemon's end of its scrub process: start it, send batches, and never be hurt by it.

Promise: every wait has an end; a process that dies, hangs or answers nonsense is a typed error for
the caller, and `kill` or `end` leave neither process nor pipe behind. What the process writes to
its standard error goes to the log. Event loop's thread; the loop must live in the daemon's main
thread, because the process dies with the thread that started it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from kvtier.config import process_environment
from kvtier.daemon.scrub_protocol import (
    FRAME_BYTES_MAX,
    LENGTH,
    Answer,
    Batch,
    Hello,
    Setup,
    decode,
    encode,
)
from kvtier.errors import DaemonUnavailable, DeadlineExceeded

__all__ = ["COMMAND", "ScrubProcess"]

log = logging.getLogger(__name__)

#: -P: what lies in the working directory is not imported.
COMMAND: Final = (sys.executable, "-P", "-m", "kvtier.daemon.scrub_worker")

_START_S: Final = 60.0
_END_S: Final = 5.0
_LAST_WORDS_S: Final = 1.0
_LINE_CHARS_MAX: Final = 500
_READ_BYTES: Final = 1 << 16
_Message = TypeVar("_Message")


class ScrubProcess:
    """One process, from `start` to `end` or `kill`; one caller at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._source = process.stdout
        self._sink = process.stdin
        self._log_task = asyncio.create_task(_log_lines(process.stderr, process.pid))
        self.hello = Hello(nice=0, io_idle=False, problems=())

    @classmethod
    async def start(
        cls, setup: Setup, *, command: Sequence[str] = COMMAND, start_s: float = _START_S
    ) -> ScrubProcess:
        """Raises DaemonUnavailable, DeadlineExceeded."""
        fds = (setup.arena_fd,) if setup.arena_fd >= 0 else ()
        try:
            child = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=fds,
                env=_environment(),
            )
        except OSError as error:
            raise DaemonUnavailable(
                f"the scrub process cannot be started: {error.strerror}",
                remedy="Try again; if it goes on, see how many processes and files are in use.",
            ) from error
        process = cls(child)
        try:
            process.hello = await process._ask(setup.to_wire(), Hello.from_wire, within_s=start_s)
        except BaseException:
            await process.kill()
            raise
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def check(self, batch: Batch, *, within_s: float) -> Answer:
        """What is wrong with the pages of `batch`.

        Raises DaemonUnavailable when the process ends or answers nonsense, DeadlineExceeded.
        """
        return await self._ask(
            batch.to_wire(), lambda message: Answer.from_wire(message, batch), within_s=within_s
        )

    async def end(self) -> None:
        """Lets it end by itself, for a while, then kills it."""
        self._sink.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._gone()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Returns when it is gone; after a while also when the system keeps it (in a read that
        cannot be interrupted): it is dead then as soon as that read ends.
        """
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
        self._sink.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._gone()
        except TimeoutError:
            log.error("scrub.process_stuck", extra={"pid": self.pid})
            self._log_task.cancel()

    async def _ask(
        self,
        message: Mapping[str, Any],
        parse: Callable[[Mapping[str, Any]], _Message],
        *,
        within_s: float,
    ) -> _Message:
        try:
            async with asyncio.timeout(within_s):
                self._sink.write(encode(message))
                await self._sink.drain()
                (length,) = LENGTH.unpack(await self._source.readexactly(LENGTH.size))
                if length > FRAME_BYTES_MAX:
                    raise ValueError(f"a frame of {length} bytes")
                return parse(decode(await self._source.readexactly(length)))
        except TimeoutError:
            raise DeadlineExceeded(
                f"the scrub process (pid {self.pid}) did not answer for {within_s:.1f} s",
                remedy="Try again; if it goes on, check the latency of the device it reads from.",
            ) from None
        except (ConnectionError, asyncio.IncompleteReadError):
            raise DaemonUnavailable(
                f"the scrub process (pid {self.pid}) {await self._how_it_ended()}",
                remedy="Try again; the daemon's log holds what the process wrote.",
            ) from None
        except ValueError as error:
            raise DaemonUnavailable(
                f"the scrub process (pid {self.pid}) answered nonsense: {error}",
                remedy="Try again; if it goes on, the installation is damaged or is being updated.",
            ) from error

    async def _how_it_ended(self) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._gone()
        code = self._process.returncode
        if code is None:
            return "shut its output"
        if code < 0:
            return f"was ended by signal {-code} ({signal.strsignal(-code) or 'unknown'})"
        return f"ended with exit code {code}"

    async def _gone(self) -> None:
        # All three pipes first: asyncio says that the process has ended only when they are shut.
        while await self._source.read(_READ_BYTES):
            pass
        await asyncio.shield(self._log_task)
        await self._process.wait()


async def _log_lines(source: asyncio.StreamReader, pid: int) -> None:
    rest = b""
    while piece := await source.read(_READ_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        rest = rest[:_LINE_CHARS_MAX]
        for line in lines:
            _log_line(line, pid)
    if rest:
        _log_line(rest, pid)


def _log_line(line: bytes, pid: int) -> None:
    text = line.decode(errors="replace")[:_LINE_CHARS_MAX]
    log.warning("scrub.process_said", extra={"pid": pid, "text": text})


def _environment() -> dict[str, str]:
    """The daemon's own, with its import path (as it is now, whatever made it) and one thread for
    numeric libraries.
    """
    path = os.pathsep.join(entry or os.curdir for entry in sys.path)
    return dict(process_environment()) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
