"""Mooncake's JSON lines and what is like them: one request a line with the ids of its blocks.

How many tokens a block has is what the lines say (`block_size`), or what fits the lengths of the
first requests. One thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from kvtier.bench.errors import TraceError
from kvtier.bench.lines import Line
from kvtier.bench.trace import Trace, TraceBuilder

__all__ = ["Stamps", "read_mooncake"]

_LOOKED_AT: Final = 256
#: The usual ones first: requests of one block each fit many.
_BLOCK_TOKENS: Final = (512, 16, 64, 256, 128, 32, 1024, 2048, 4096, 8, 4, 2, 1)
_NO_PARENT: Final = -1


@dataclass(frozen=True, slots=True)
class Stamps:
    """Which field names the session, None for none, and how many seconds a tick is."""

    session: str | None
    tick_s: float


def read_mooncake(
    lines: Iterable[Line], block_tokens: int | None, stamps: Stamps, *, format_name: str
) -> Trace:
    """Raises TraceError for a line that is no request, or whose length is more than a block off."""
    rest = iter(lines)
    head = list(islice(rest, _LOOKED_AT))
    if not head:
        return TraceBuilder(format_name, block_tokens or 1).build()
    tokens = block_tokens or _fitting(head)
    builder = TraceBuilder(format_name, tokens)
    has_times = "timestamp" in head[0]
    sessions = _Sessions(stamps.session)
    for number, line in enumerate(chain(head, rest)):
        ids, length = line.ids("hash_ids"), line.count("input_length")
        if abs(len(ids) * tokens - length) > tokens:
            raise line.wrong(
                f"{len(ids)} blocks of {tokens} tokens do not fit input_length {length}",
                "give the tokens of a block with --block-tokens, or mend the line",
            )
        builder.add(
            _follow(builder, line, ids),
            arrival_s=line.seconds("timestamp") * stamps.tick_s if has_times else float(number),
            session=sessions.of(line),
            input_tokens=length,
            output_tokens=line.count("output_length") if "output_length" in line else 0,
        )
    notes = () if has_times else ("no times in the file: one request a second in its order",)
    return builder.build(notes)


def _follow(builder: TraceBuilder, line: Line, ids: list[Any]) -> int:
    try:
        return builder.blocks.follow(ids)
    except TypeError:
        if not all(isinstance(content, str) for content in ids):
            raise line.wrong("hash_ids has an id that is no whole number") from None
    return builder.blocks.follow([builder.blocks.number(content) for content in ids])


def _fitting(head: list[Line]) -> int:
    """The tokens of a block by the lengths of these requests: those for which every last block is
    there and begun, else (some tools count tokens that are in no block) those that come close."""
    if "block_size" in head[0]:
        return head[0].count("block_size", 1)
    sizes = [(len(line.ids("hash_ids")), line.count("input_length")) for line in head]
    for tokens in _BLOCK_TOKENS:
        if all((n - 1) * tokens < max(1, length) <= max(1, n * tokens) for n, length in sizes):
            return tokens
    for tokens in _BLOCK_TOKENS:
        if all(abs(n * tokens - length) <= tokens for n, length in sizes):
            return tokens
    raise TraceError(
        f"{head[0].path}: no number of tokens a block fits the first {len(head)} requests",
        remedy="give it with --block-tokens; the line that does not fit it is named then",
    )


class _Sessions:
    """A chat goes on its parent's session."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._of_chat: dict[Hashable, Hashable] = {}

    def of(self, line: Line) -> Hashable | None:
        if self._name is None:
            return None
        own = _name(line, self._name)
        if self._name != "chat_id":
            return own
        parent = _name(line, "parent_chat_id") if "parent_chat_id" in line else _NO_PARENT
        session = own if parent == _NO_PARENT else self._of_chat.get(parent, parent)
        self._of_chat[own] = session
        return session


def _name(line: Line, field: str) -> Hashable:
    value = line.get(field)
    if not isinstance(value, int | str):
        raise line.wrong(f"{field} is neither a number nor text")
    return value
