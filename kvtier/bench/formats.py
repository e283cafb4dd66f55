"""Which format a trace file has, and reading it: the one door to all readers.

    mooncake            timestamp (ms), input_length, output_length, hash_ids
    mooncake-sessions   the same with session_id
    mooncake-chats      the same with chat_id and parent_chat_id
    bailian             chat_id, parent_chat_id, timestamp (s), type, turn, hash_ids of 16 tokens
    weka                kv-cache-tester: one JSON object a session, with nested requests
    agent-compact       sessions as differences between requests, one request a line
    ragpulse            ids of components, and files beside it with the tokens of each

A file may be gzip or not; what it is called does not matter (but for ragpulse's components). All
formats are chained on reading: two blocks are one only if everything before them is equal too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from kvtier.bench.arrivals import Arrivals
from kvtier.bench.errors import TraceError
from kvtier.bench.lines import Line, Lines, Progress, whole_file
from kvtier.bench.read_agent import read_compact, read_weka
from kvtier.bench.read_mooncake import Stamps, read_mooncake
from kvtier.bench.read_ragpulse import read_ragpulse
from kvtier.bench.trace import Trace

__all__ = ["ReadOptions", "TraceFormat", "detect", "read_trace"]

_KNOWN: Final = "see `kvtier bench hit-ratio --help` for the formats that are read"


class TraceFormat(StrEnum):
    MOONCAKE = "mooncake"
    MOONCAKE_SESSIONS = "mooncake-sessions"
    MOONCAKE_CHATS = "mooncake-chats"
    BAILIAN = "bailian"
    WEKA = "weka"
    AGENT_COMPACT = "agent-compact"
    RAGPULSE = "ragpulse"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """`block_tokens` None: what the file says, or fits; 256 for agent traces and 64 for ragpulse,
    whose blocks are made here."""

    block_tokens: int | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)
    progress: Progress | None = None


def detect(path: Path) -> TraceFormat:
    """The format of a trace. Raises TraceError for a file that has none of them."""
    if path.is_dir():
        return TraceFormat.WEKA
    first = _first(path)
    fields = first.fields
    ids = fields.get("hash_ids")
    found = None
    if isinstance(fields.get("requests"), list):
        found = TraceFormat.WEKA
    elif "meta" in fields or {"s", "t", "k", "r"} <= fields.keys():
        found = TraceFormat.AGENT_COMPACT
    elif isinstance(ids, dict):
        found = TraceFormat.RAGPULSE
    elif isinstance(ids, list):
        found = _flat(fields)
    if found is None:
        names = ", ".join(sorted(map(str, fields))[:8])
        raise first.wrong(f"no known trace format; its fields are: {names}", _KNOWN)
    return found


def _flat(fields: Any) -> TraceFormat:
    if "chat_id" in fields and ("turn" in fields or "type" in fields):
        return TraceFormat.BAILIAN
    if "chat_id" in fields:
        return TraceFormat.MOONCAKE_CHATS
    return TraceFormat.MOONCAKE_SESSIONS if "session_id" in fields else TraceFormat.MOONCAKE


def _first(path: Path) -> Line:
    """The first object: a line, or the whole file when it is one object on several lines."""
    try:
        for line in Lines(path):
            return line
    except TraceError as error:
        try:
            return whole_file(path)
        except TraceError:
            raise error from None
    raise TraceError(f"{path}: empty", remedy="name a trace with at least one request")


def read_trace(path: Path, options: ReadOptions | None = None) -> Trace:
    """Reads a trace to its end. Raises TraceError, naming file and line, for what is malformed."""
    chosen = options or ReadOptions()
    found = detect(path)
    if found is TraceFormat.AGENT_COMPACT:
        trace = read_compact(
            Lines(path, chosen.progress), chosen.block_tokens, arrivals=chosen.arrivals
        )
    elif found is TraceFormat.WEKA:
        trace = read_weka(path, chosen.block_tokens, chosen.arrivals, progress=chosen.progress)
    elif found is TraceFormat.RAGPULSE:
        trace = read_ragpulse(Lines(path, chosen.progress), chosen.block_tokens)
    else:
        stamps = {
            TraceFormat.MOONCAKE_SESSIONS: Stamps("session_id", 1e-3),
            TraceFormat.MOONCAKE_CHATS: Stamps("chat_id", 1e-3),
            TraceFormat.BAILIAN: Stamps("chat_id", 1.0),
        }.get(found, Stamps(None, 1e-3))
        trace = read_mooncake(
            Lines(path, chosen.progress), chosen.block_tokens, stamps, format_name=found.value
        )
    if not trace.requests:
        raise TraceError(f"{path}: no requests", remedy="name a trace with at least one request")
    if not trace.input_tokens.any():
        raise TraceError(
            f"{path}: no request has an input token", remedy="name a trace with inputs to find"
        )
    return trace
