"""Mooncake's JSON lines and what is like them: one request a line with the ids of its blocks.

How many tokens a block has is what the lines say (`block_size`), or what fits the lengths of the
first requests. One thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from kvtier.bench.errors import TraceError
from kvtier.bench.lines import Line
from kvtier.bench.trace import Blocks, Trace, TraceBuilder

__all__ = ["Stamps", "read_mooncake"]

_LOOKED_AT: Final = 256
#: The usual ones first: requests of one block each fit many.
_BLOCK_TOKENS: Final = (512, 16, 64, 256, 128, 32, 1024, 2048, 4096, 8, 4, 2, 1)
_NO_PARENT: Final = -1
_ALIKE: Final = ("timestamp", "session_id", "chat_id", "block_size")


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
    sessions, contents = _Sessions(stamps.session), _Contents(builder.blocks)
    for number, line in enumerate(chain(head, rest)):
        _check_like(head[0], line)
        ids = contents.of(line)
        length = line.tokens(
            "input_length",
            blocks=len(ids),
            block_tokens=tokens,
            remedy="give the tokens of a block with --block-tokens, or mend the line",
        )
        builder.add(
            builder.blocks.follow(ids),
            arrival_s=line.seconds("timestamp") * stamps.tick_s if has_times else float(number),
            session=sessions.of(line),
            input_tokens=length,
            output_tokens=line.count("output_length") if "output_length" in line else 0,
        )
    notes = () if has_times else ("no times in the file: one request a second in its order",)
    return builder.build(notes)


def _check_like(first: Line, line: Line) -> None:
    """What the first line says of a request's time, session and blocks holds for all."""
    for name in _ALIKE:
        if (name in line) != (name in first):
            has, had = (("no ", "has"), ("", "has none"))[name in line]
            raise line.wrong(f"{has}field {name!r}, and the first line {had}")
    if "block_size" in line and line.get("block_size") != first.get("block_size"):
        raise line.wrong(
            f"block_size is {line.get('block_size')}, and {first.get('block_size')} in the first "
            "line"
        )


class _Contents:
    """The ids of a line as whole numbers: all lines have numbers, or all have texts."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._are_texts: bool | None = None

    def of(self, line: Line) -> Sequence[int]:
        ids = line.ids("hash_ids")
        are_texts = bool(ids) and set(map(type, ids)) == {str}
        if not are_texts:
            ids = line.whole_ids("hash_ids")
        if ids:
            if self._are_texts not in (None, are_texts):
                kinds = ("text, and numbers", "numbers, and text")[not are_texts]
                raise line.wrong(f"hash_ids are {kinds} in the lines before")
            self._are_texts = are_texts
        return [self._blocks.number(content) for content in ids] if are_texts else ids


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
        own = line.name(self._name)
        if self._name != "chat_id":
            return own
        parent = line.name("parent_chat_id") if "parent_chat_id" in line else _NO_PARENT
        session = own if parent == _NO_PARENT else self._of_chat.get(parent, parent)
        self._of_chat[own] = session
        return session
