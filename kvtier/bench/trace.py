"""A trace: requests in the order of their arrival, over blocks that stand for prefixes.

A block is a node of a tree: it stands for its tokens and for everything before them, so a request
is known by its last block alone, and equal blocks mean equal KV. Blocks that a request brought are
numbered one after the other (a run), so a request's blocks are found by walking its runs upwards.
All is kept in arrays: 12 bytes a block ever seen and 44 bytes a request, however often blocks are
used. (While a trace is read a dictionary finds blocks, some 150 bytes each; it is dropped then.) A
Paths holds the last requests of some sessions beside that, of at most `held_max` blocks in all.

A Trace never changes and may be used by any thread; a Paths and a TraceBuilder have one user.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["NO_BLOCK", "Blocks", "Paths", "Trace", "TraceBuilder"]

NO_BLOCK = -1
_ROOT = 0  # in the dictionary of a builder blocks are numbered from 1
_NO_SESSION = -1
#: Blocks of paths that are held, 4 bytes each.
_HELD_MAX: Final = 1 << 22

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


_ALL: Final = slice(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Columns of `requests` requests in the order of arrival, and the tree of their blocks."""

    format: str
    block_tokens: int
    arrival_s: npt.NDArray[np.float64]
    session: Ints
    leaf: Ints  # the last block of the request, or NO_BLOCK
    blocks: Ints  # how many blocks it has
    input_tokens: Longs
    output_tokens: Longs
    #: Of the input, what the blocks stand for: the rest has no id, and is never found.
    known_tokens: Longs
    parent: Ints  # of each block: the one before it, or NO_BLOCK
    run: Ints  # of each block: the first of its run
    depth: Ints  # of each block: blocks before it
    #: Where arrivals and sessions come from, when the file does not say it itself.
    notes: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        return len(self.leaf)

    @property
    def blocks_seen(self) -> int:
        return len(self.parent)

    @property
    def references(self) -> int:
        return int(self.blocks.sum())

    @property
    def sessions(self) -> int:
        return int(self.session.max(initial=-1)) + 1

    @property
    def working_set_tokens(self) -> int:
        """Of block slots: what a cache that never evicts would hold in the end."""
        return self.blocks_seen * self.block_tokens

    def head(self, requests: int) -> Trace:
        """The first so many requests, over the same tree."""
        return replace(
            self,
            arrival_s=self.arrival_s[:requests],
            session=self.session[:requests],
            leaf=self.leaf[:requests],
            blocks=self.blocks[:requests],
            input_tokens=self.input_tokens[:requests],
            output_tokens=self.output_tokens[:requests],
            known_tokens=self.known_tokens[:requests],
        )

    def tokens(self, blocks: Ints, requests: slice | int = _ALL) -> Longs:
        """Of each of these requests, the input tokens in its first `blocks` blocks, an array. A
        last block that is not full weighs what it has."""
        whole = blocks.astype(np.int64) * self.block_tokens
        found: Longs = np.minimum(whole, self.known_tokens[requests])
        return found


class Paths:
    """The blocks of each request, from the first to the last.

    A session's last path is held, since the next one begins like it; those that were not used for
    the longest time go when more than `held_max` blocks are held.
    """

    def __init__(self, trace: Trace, held_max: int = _HELD_MAX) -> None:
        self._trace = trace
        self._held_max, self._held = held_max, 0
        self._leaf, self._session = trace.leaf.data, trace.session.data
        self._parent, self._run = trace.parent.data, trace.run.data
        self._depth = trace.depth.data
        self._last: OrderedDict[int, Ints] = OrderedDict()  # by session

    def __getitem__(self, request: int) -> Ints:
        block = self._leaf[request]
        if block == NO_BLOCK:
            return np.empty(0, np.int32)
        session = self._session[request]
        before = self._last.get(session)
        known = 0 if before is None else len(before)
        depth = self._depth
        end = depth[block] + 1
        path = np.empty(end, np.int32)
        while block != NO_BLOCK:
            if before is not None and end <= known and before[end - 1] == block:
                path[:end] = before[:end]
                break
            first = self._run[block]
            begin = depth[first]
            path[begin:end] = np.arange(first, block + 1)
            block, end = self._parent[first], begin
        self._hold(session, path, known)
        return path

    def _hold(self, session: int, path: Ints, before: int) -> None:
        last = self._last
        last[session] = path
        last.move_to_end(session)
        self._held += len(path) - before
        while self._held > self._held_max:
            self._held -= len(last.popitem(last=False)[1])

    def __iter__(self) -> Iterator[Ints]:
        return (self[request] for request in range(self._trace.requests))


class Blocks:
    """The tree while it is read: finds or makes the block of some content after another block."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._texts: dict[Hashable, int] = {}
        self.parent = array("i")
        self.run = array("i")
        self.depth = array("i")

    def __len__(self) -> int:
        return len(self.parent)

    def number(self, content: Hashable) -> int:
        """One whole number for each content that is none itself."""
        return self._texts.setdefault(content, len(self._texts))

    def follow(self, ids: Sequence[int], after: int = NO_BLOCK) -> int:
        """The last block of `ids`, whole numbers that name content, after a block."""
        known = self._known
        at, i = after + 1, 0
        for i, content in enumerate(ids):
            found = known.get((content << 32) | at)
            if found is None:
                return self._make(ids, i, at)
            at = found
        return at - 1

    def _make(self, ids: Sequence[int], begin: int, at: int) -> int:
        """Nothing can follow a new block yet, so all from here on are new: one run."""
        known, first = self._known, len(self.parent)
        depth = self.depth[at - 1] + 1 if at else 0
        for content in ids[begin:] if begin else ids:
            key = (content << 32) | at
            self.parent.append(at - 1)
            self.run.append(first)
            self.depth.append(depth)
            at = known[key] = len(self.parent)
            depth += 1
        return at - 1


class TraceBuilder:
    """Takes requests in any order; `build` puts them in the order of their arrival."""

    def __init__(self, format_name: str, block_tokens: int) -> None:
        self.blocks = Blocks()
        self._format = format_name
        self._block_tokens = block_tokens
        self._sessions: dict[Hashable, int] = {}
        self._arrival = array("d")
        self._session = array("i")
        self._leaf = array("i")
        self._lengths = array("q")  # three a request: input, output, known

    def add(
        self,
        leaf: int,
        *,
        arrival_s: float,
        session: Hashable | None,
        input_tokens: int,
        output_tokens: int,
        known_tokens: int | None = None,
    ) -> None:
        """`session` None: nothing is known of it; then it must be None for all. `known_tokens`:
        what the blocks stand for, by default all that has room in them."""
        number = _NO_SESSION
        if session is not None:
            number = self._sessions.setdefault(session, len(self._sessions))
        self._leaf.append(leaf)
        self._arrival.append(arrival_s)
        self._session.append(number)
        room = 0 if leaf == NO_BLOCK else (self.blocks.depth[leaf] + 1) * self._block_tokens
        if known_tokens is not None:
            room = min(room, known_tokens)
        self._lengths.extend((input_tokens, output_tokens, min(room, input_tokens)))

    def build(self, notes: Sequence[str] = ()) -> Trace:
        arrival = np.array(self._arrival, np.float64)
        order = np.argsort(arrival, kind="stable")
        leaf = np.array(self._leaf, np.int32)[order]
        lengths = np.array(self._lengths, np.int64).reshape(-1, 3)[order]
        session = np.array(self._session, np.int32)[order]
        depth = np.array(self.blocks.depth, np.int32)
        blocks = np.where(leaf == NO_BLOCK, 0, depth[leaf] + 1 if len(depth) else 0)
        trace = Trace(
            format=self._format,
            block_tokens=self._block_tokens,
            arrival_s=arrival[order],
            session=session,
            leaf=leaf,
            blocks=blocks.astype(np.int32),
            input_tokens=lengths[:, 0].copy(),
            output_tokens=lengths[:, 1].copy(),
            known_tokens=lengths[:, 2].copy(),
            parent=np.array(self.blocks.parent, np.int32),
            run=np.array(self.blocks.run, np.int32),
            depth=depth,
            notes=tuple(notes),
        )
        if not self._sessions and len(leaf):
            trace = replace(
                trace,
                session=reconstruct_sessions(trace),
                notes=(*notes, "sessions reconstructed: the file names none"),
            )
        return trace


def reconstruct_sessions(trace: Trace) -> Ints:
    """A session number for each request: that of the session which owns the deepest of its blocks,
    the first block not counted, because a system prompt is everybody's; a new one if none is owned.

    A request owns all its blocks that nobody owned before.
    """
    owner = np.full(trace.blocks_seen, _NO_SESSION, np.int32)
    found = np.empty(trace.requests, np.int32)
    count = 0
    for request, path in enumerate(Paths(replace(trace, session=np.zeros_like(trace.session)))):
        path = path[1:]
        owned = np.flatnonzero(owner[path] != _NO_SESSION)
        if len(owned):
            session = int(owner[path[owned[-1]]])
        else:
            session, count = count, count + 1
        found[request] = session
        owner[path[owner[path] == _NO_SESSION]] = session
    return found
