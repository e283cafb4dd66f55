"""Structured logging: one event a line on standard error, as logfmt or JSON, with a stable name.

Every module of kvtier logs as `log.info("daemon.ready", extra={"directory": ...})`: the message is
the event's name, `extra` its fields. Names are an interface (operators alert on them, tests wait
for them), so all of them stand in the registry below; a test compares it with the code. What runs
in other people's programs logs sentences, with the event's name as the field `event`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

from kvtier.config import LogFormat, LogLevel

__all__ = ["EVENTS", "setup_logging"]

#: Every event: name -> what it says.
EVENTS: dict[str, str] = {
    "daemon.starting": "The process starts.",
    "daemon.ready": "Self-tests have passed, calls are served.",
    "daemon.draining": "No new work is taken; what is under way may end.",
    "daemon.stopped": "The daemon ends in order.",
    "daemon.degraded": "Something runs in a lesser way than configured; `what` says how.",
    "daemon.start_failed": "The daemon cannot start; error and remedy are named.",
    "daemon.crashed": "An unexpected error ends the daemon; the traceback follows.",
    "daemon.crash_armed": "This process will end by SIGKILL at the named place, for a test.",
    "config.value": "One value that is not the default, and its source.",
    "fp8.fallback": "FP8 pages are packed by torch, some ten times slower; why, and the remedy.",
    "sums.fallback": "Payload sums are made by xxhash page by page; why, and the remedy.",
    "local.attached": "A client has the arena and the directory; how many have.",
    "local.refused": "A client of the control socket is cut off, and why.",
    "local.accept_failed": "A client of the control socket could not be let in, and why.",
    "local.attach_crashed": "Attaching met an unexpected error; the traceback follows.",
    "local.not_attached": "A client does without shared memory, and why; it goes on over gRPC.",
    "local.no_writer": "A client puts over gRPC for want of a writer, and why; it is tried again.",
    "local.writer_lost": "A writer ended in the middle of a put, and why; the put goes over gRPC.",
    "local.namespace_unlisted": "The directory has no word for a namespace: it goes over gRPC.",
    "local.kernels.numpy": "The directory's inner loops are numpy's, for want of numba.",
    "local.kernels.no_numba": "The directory's compiled loops cannot be used, and why.",
    "local.kernels.stale_cache": "The compiled loops do not do what numpy does, and are not used.",
    "selftest.passed": "One page made a round trip through this tier or plane.",
    "host.arena.created": "The arena's address space is reserved.",
    "host.arena.no_huge_pages": "The arena lies in normal pages although huge ones were free.",
    "host.arena.populate_by_touch": "The kernel has no MADV_POPULATE_WRITE; pages are touched.",
    "host.arena.populated": "The whole arena is in memory.",
    "host.arena.degraded": "Populating stopped early; the tier stays smaller.",
    "host.arena.closed_with_views": "The arena was closed with views of it still in use.",
    "host.memory.reduced": "Less memory than configured was there at the start.",
    "session.opened": "A client session began.",
    "session.closed": "A client session ended, by its client or by its time.",
    "pool.told": "An engine tells of a device pool for the first time.",
    "pool.gone": "A device pool was taken back by its engine, or its session has ended.",
    "namespace.opened": "A namespace was made.",
    "namespace.bumped": "A namespace has a new generation; older pages are misses.",
    "namespace.deleted": "A namespace and its pages are gone.",
    "page.corrupt": "A page failed its checksum and was condemned.",
    "page.unreadable": "A page on NVMe that nobody can read was given up.",
    "scrub.started": "A tier is being read again; how its process runs is named.",
    "scrub.ended": "A scrub has read every page that was there when it began.",
    "scrub.failed": "A scrub ended early; its process is gone, and the next one starts another.",
    "scrub.skipped": "The time for a scrub came while one was under way.",
    "scrub.read_failed": "Pages could not be read by a scrub; the first error is named.",
    "scrub.false_alarm": "A page that its process called corrupt is whole when read again.",
    "scrub.process_said": "A line that the scrub's process wrote to its standard error.",
    "scrub.process_stuck": "The scrub's process was killed and is kept by a read in the kernel.",
    "daemon.drained": "What there was time for is done; so many pages end with the process.",
    "nvme.device.opened": "A device of the NVMe tier is open; its segments are counted.",
    "nvme.direct_io.refused": "A file is read and written through the page cache, and why.",
    "nvme.segment.rejected": "A segment file is not what its name says, and is not used.",
    "nvme.device_read_only": "A device takes no writes; what is on it is served.",
    "nvme.device_writable": "A device that was read-only is written to again.",
    "nvme.pages_given_up": "Pages of devices that were away too long wait no more.",
    "io_pool.ended_unheard": "An access of a device failed after nobody waited for it any more.",
    "nvme.device_unusable": "A path of nvme.paths cannot be used in this boot.",
    "nvme.device_offline": "A device failed and is left alone for a while; its pages are misses.",
    "nvme.device_online": "A device that was offline answers again; it begins empty.",
    "nvme.device_named_again": "The file `device` of a device was gone: it is written again.",
    "nvme.device_not_noted": "A device took no note of how far the daemon directory has got.",
    "nvme.io_error": "A read or write of a device failed.",
    "nvme.no_room": "No other segment can be made, for want of room or of rights.",
    "nvme.recovery": "What a start found amiss on NVMe; also in `kvtier status`.",
    "nvme.recovered": "The pages of earlier boots are back; how many, and how long it took.",
    "nvme.checkpoint": "A checkpoint is written.",
    "nvme.end_cut_short": "A step of the end took too long or failed; the next start reads more.",
    "nvme.journal_failed": "The daemon directory took no entry: nothing goes to NVMe meanwhile.",
    "nvme.journal_works": "What the daemon directory refused before is written now.",
    "nvme.state_rebuilt": "Files were taken from a running daemon: a new checkpoint is written.",
    "daemon.state_restored": "A state file was taken from a running daemon: it is written again.",
    "daemon.state_lost": "The daemon directory cannot be made good: nothing durable meanwhile.",
    "nvme.move_crashed": "A movement met an unexpected error; the traceback follows.",
    "rpc.traced": "A call that named the trace it belongs to (level debug).",
    "rpc.crashed": "A call met an unexpected error; the traceback follows.",
    "rpc.cut_off": "A call ended, by its client or with the daemon, before its answer was sent.",
    "task.crashed": "A background task met an unexpected error; it goes on.",
}

log = logging.getLogger(__name__)

#: Where gRPC's asyncio server logs, and how its lines about calls that were ended begin
#: (grpc 1.85, _cython/_cygrpc/aio/server.pyx.pxi, `_handle_exceptions` and `_schedule_rpc_coro`).
_GRPC_SERVER = "grpc._cython.cygrpc"
_BATCH_FAILED = "ExecuteBatchError raised in core by servicer method"
_NOT_HANDLED = "Exception not handled by _handle_exceptions in servicer method"

_PLAIN = re.compile(r"[^\s\"=\\]+")
_RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup_logging(level: LogLevel, style: LogFormat) -> None:
    """Sends all logging of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style is LogFormat.JSON else _Logfmt())
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    library = logging.getLogger(_GRPC_SERVER)
    library.filters[:] = [_is_no_cut_off]
    # asyncio's own debug lines are about its internals.
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _is_no_cut_off(record: logging.LogRecord) -> bool:
    """False of what gRPC says, with a traceback and as an error, of a call that was ended a moment
    before its answer could be sent, or cancelled: one event of ours says that. A fault of ours in a
    call is another of its lines ("Unexpected [...] raised by servicer method"), and stays.
    """
    error = record.exc_info[1] if record.exc_info else None
    start, _, method = record.getMessage().partition(" [")
    is_cancelled = start == _NOT_HANDLED and isinstance(error, asyncio.CancelledError)
    if start != _BATCH_FAILED and not is_cancelled:
        return True
    log.info("rpc.cut_off", extra={"rpc": method.rstrip("]"), "why": str(error) or "cancelled"})
    return False


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    moment = datetime.fromtimestamp(record.created, UTC)
    message = record.getMessage()
    # What a client's program shows without these formatters is a sentence: its event is a field.
    event = vars(record).get("event", message)
    facts: dict[str, Any] = {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "event": event if event in EVENTS else "log",
    }
    if event not in EVENTS:
        facts |= {"logger": record.name, "message": message}
    return facts | {
        name: value
        for name, value in vars(record).items()
        if name not in _RECORD_FIELDS and name != "event"
    }


class _Logfmt(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = _facts(record)
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_quoted(value)}" for key, value in facts.items())


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = _facts(record)
        if record.exc_info:
            facts["traceback"] = self.formatException(record.exc_info)
        return json.dumps(facts, default=str)


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
