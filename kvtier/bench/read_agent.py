"""Sessions of coding agents as kv-cache-tester has them (weka's JSON), and a compact form of it.

Times are those inside a session, so starts are drawn (arrivals.py). Blocks of the file, 64 tokens
each, are joined to blocks of `block_tokens`: the last one of a request may be shorter, and then is
another block than a whole one. Ids of scope `local` name content inside their session alone.

Weka's form: {"block_size", "hash_id_scope", "requests": [{"t", "in", "out", "hash_ids"}, ...]},
where a request may hold further "requests" of its own; a file has one session, or one a line.

The compact form: after a line {"meta": {"block_size", "hash_id_scope"}}, "global" if it says none,
one request a line, of one session after the other: {"s": session, "t": seconds, "in", "out":
tokens, "k": leading ids kept from the request before, "r": [[first, count], ...] of the ids after
those}. One thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvtier.bench.arrivals import Arrivals, SessionClock
from kvtier.bench.errors import TraceError
from kvtier.bench.lines import Line, Lines, Progress, first_bytes, whole_file
from kvtier.bench.trace import NO_BLOCK, Blocks, Trace, TraceBuilder

__all__ = ["read_compact", "read_weka"]

_BLOCK_TOKENS: Final = 256
_FILE_BLOCK_TOKENS: Final = 64
_IDS_MAX: Final = 1 << 22
_SCOPE_BITS: Final = 66  # ids have 64, with a sign or without
_NESTED_MAX: Final = 64


class _Joiner:
    """Joins a file's blocks to larger ones, looking at those alone that a session's last request
    did not begin with."""

    def __init__(self, blocks: Blocks, group: int) -> None:
        self._blocks = blocks
        self._group = group
        self._fine = Blocks()
        self._ids: list[int] = []
        self._fine_path: list[int] = []
        self._path: list[int] = []
        self._scope = 0

    def begin(self, scope: int) -> None:
        """Another session, whose ids are its own when `scope` is not 0."""
        self._ids, self._fine_path, self._path = [], [], []
        self._scope = scope << _SCOPE_BITS

    def leaf(self, kept: int, ids: Sequence[int]) -> int:
        """The last block of the first `kept` ids of the last request and `ids` after them."""
        self._ids[kept:] = ids
        fine = self._fine_path
        del fine[kept:]
        at = fine[-1] if fine else NO_BLOCK
        for content in ids:
            at = self._fine.follow((content + self._scope,), at)
            fine.append(at)
        group, path = self._group, self._path
        del path[kept // group :]
        at = path[-1] if path else NO_BLOCK
        for begin in range(len(path) * group, len(fine), group):
            at = self._blocks.follow((fine[min(begin + group, len(fine)) - 1],), at)
            path.append(at)
        return at

    def leaf_of(self, ids: list[int]) -> int:
        """The same, from all ids of a request."""
        kept = _common(self._ids, ids)
        return self.leaf(kept, ids[kept:])


def _common(a: list[int], b: list[int]) -> int:
    """How many leading items are equal: halves are compared whole, so it is quick."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _group_of(line: Line, file_tokens: int, block_tokens: int | None) -> tuple[int, int]:
    """(tokens a block, blocks of the file in each)."""
    tokens = block_tokens or max(_BLOCK_TOKENS, file_tokens)
    if tokens % file_tokens:
        raise line.wrong(
            f"blocks of {file_tokens} tokens cannot be joined to blocks of {tokens}",
            f"give --block-tokens as a multiple of {file_tokens}",
        )
    return tokens, tokens // file_tokens


def read_compact(lines: Iterable[Line], block_tokens: int | None, *, arrivals: Arrivals) -> Trace:
    """Raises TraceError for a line that is neither of the two kinds."""
    builder, joiner, session = None, None, None
    file_tokens, is_local, has_meta = _FILE_BLOCK_TOKENS, False, False
    sessions: set[int] = set()
    clock = SessionClock(arrivals)
    length = 0
    for line in lines:
        if "meta" in line:
            if has_meta or builder is not None:
                raise line.wrong("meta is not the first line", "give each file for itself")
            (file_tokens, is_local), has_meta = _meta(line), True
            continue
        if line.fields.keys() == {"models"}:  # names of the models, by the numbers in "m"
            continue
        if builder is None or joiner is None:
            tokens, group = _group_of(line, file_tokens, block_tokens)
            builder = TraceBuilder("agent-compact", tokens)
            joiner = _Joiner(builder.blocks, group)
        own = line.count("s")
        if own != session:
            if own in sessions:
                raise line.wrong(
                    f"session {own} goes on after another one",
                    "put the lines of each session one after the other",
                )
            sessions.add(own)
            session, length = own, 0
            joiner.begin(len(sessions) if is_local else 0)
            clock.begin(line.seconds("t"))
        kept = line.count("k")
        if kept > length:
            raise line.wrong(f"k is {kept}, and the request before has {length} blocks")
        ids = _ranges(line)
        length = kept + len(ids)
        builder.add(
            joiner.leaf(kept, ids),
            arrival_s=clock.at(line.seconds("t")),
            session=session,
            input_tokens=line.tokens("in", blocks=length, block_tokens=file_tokens),
            output_tokens=line.count("out"),
            known_tokens=length * file_tokens,
        )
    return (builder or TraceBuilder("agent-compact", file_tokens)).build((str(arrivals),))


def _meta(line: Line) -> tuple[int, bool]:
    """(tokens a block, are ids those of a session alone)."""
    meta = line.get("meta")
    if not isinstance(meta, dict):
        raise line.wrong("meta is no object")
    inside = Line(line.path, line.number, meta, inside="meta")
    return inside.count("block_size", 1), _is_local(inside, default="global")


def _is_local(line: Line, *, default: str) -> bool:
    scope = line.get("hash_id_scope") if "hash_id_scope" in line else default
    if scope not in ("local", "global"):
        raise line.wrong(f"hash_id_scope is {scope!r:.40}, neither 'local' nor 'global'")
    return bool(scope == "local")


def _ranges(line: Line) -> list[int]:
    ids: list[int] = []
    for pair in line.ids("r"):
        is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not is_pair or not 0 < pair[1] <= _IDS_MAX:
            raise line.wrong(f"r has {pair!r}, not [first id, count]")
        ids.extend(range(pair[0], pair[0] + pair[1]))
    return ids


def read_weka(
    path: Path, block_tokens: int | None, arrivals: Arrivals, *, progress: Progress | None = None
) -> Trace:
    """A file, or every *.json and *.json.gz of a folder in the order of their names."""
    builder, joiner, known_size = None, None, 0
    clock = SessionClock(arrivals)
    for number, line in enumerate(_sessions(path, progress), 1):
        file_tokens = line.count("block_size", 1) if "block_size" in line else _FILE_BLOCK_TOKENS
        tokens, group = _group_of(line, file_tokens, block_tokens)
        if builder is None or joiner is None:
            builder, known_size = TraceBuilder("weka", tokens), file_tokens
            joiner = _Joiner(builder.blocks, group)
        if file_tokens != known_size:
            raise line.wrong(
                f"block_size is {file_tokens}, and {known_size} in the sessions before",
                "give the sessions of each size for themselves",
            )
        is_local = _is_local(line, default="local")
        joiner.begin(number if is_local else 0)
        requests = sorted(_flat(line), key=lambda r: r.seconds("t"))
        if requests:
            clock.begin(requests[0].seconds("t"))
        for request in requests:
            ids = request.whole_ids("hash_ids")
            builder.add(
                joiner.leaf_of(ids),
                arrival_s=clock.at(request.seconds("t")),
                session=number,
                input_tokens=request.tokens("in", blocks=len(ids), block_tokens=file_tokens),
                output_tokens=request.count("out") if "out" in request else 0,
                known_tokens=len(ids) * file_tokens,
            )
    return (builder or TraceBuilder("weka", _FILE_BLOCK_TOKENS)).build((str(arrivals),))


def _flat(line: Line, nested: int = 0) -> Iterator[Line]:
    """The requests of a session, those that its requests hold among them."""
    if nested > _NESTED_MAX:
        raise line.wrong(f"requests nested more than {_NESTED_MAX} deep")
    for at, entry in enumerate(line.ids("requests")):
        if not isinstance(entry, dict):
            raise line.wrong(f"requests[{at}] is no object")
        request = line.entry("requests", at, entry)
        if isinstance(entry.get("requests"), list):
            yield from _flat(request, nested + 1)
        else:
            yield request


def _sessions(path: Path, progress: Progress | None) -> Iterator[Line]:
    files = [path]
    if path.is_dir():
        files = sorted([*path.glob("*.json"), *path.glob("*.json.gz")])
        if not files:
            raise TraceError(f"{path}: no *.json in this folder", remedy="name a trace")
    for file in files:
        try:
            is_lines = isinstance(json.loads(first_bytes(file)), dict)
        except (ValueError, RecursionError):
            is_lines = False
        if is_lines:
            yield from Lines(file, progress)
        else:
            yield whole_file(file)
