"""RAGPulse: requests as ids of components (system prompt, passages, history, search, input), and
one file a component with the tokens of each id.

Components are laid one after the other in the order of the line and cut to blocks of
`block_tokens`; what input_length has beyond them is the request's own. A block is known by the
components that it holds a part of, each by its field and id, and by all before it. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvtier.bench.errors import TraceError
from kvtier.bench.lines import Line, Lines
from kvtier.bench.trace import Blocks, Trace, TraceBuilder

__all__ = ["read_ragpulse"]

_BLOCK_TOKENS: Final = 64
_TICK_S: Final = 1.0
#: Field of hash_ids -> (part of the name of its file, field of the id there).
_COMPONENTS: Final = {
    "sys_prompt": ("sys_prompt", "sys_prompt_id"),
    "passages_ids": ("passages", "passage_id"),
    "history": ("history", "history_id"),
    "web_search": ("web_search", "web_search_id"),
    "user_input": ("user_input", "user_input_id"),
}


def read_ragpulse(lines: Lines, block_tokens: int | None) -> Trace:
    """Raises TraceError for a malformed line, and for a component without its file."""
    tokens = block_tokens or _BLOCK_TOKENS
    builder = TraceBuilder("ragpulse", tokens)
    lengths = {field: _lengths(lines.path, field) for field in _COMPONENTS}
    for number, line in enumerate(lines):
        pieces = _pieces(builder.blocks, line, lengths)
        length = line.count("input_length")
        own = length - sum(size for _, size in pieces)
        if own > 0:
            pieces.append((builder.blocks.number(("own", number)), own))
        leaf = builder.blocks.follow(list(_contents(builder.blocks, pieces, tokens, length)))
        builder.add(
            leaf,
            arrival_s=line.seconds("timestamp") * _TICK_S,
            session=line.name("session_id"),
            input_tokens=length,
            output_tokens=line.count("output_length"),
        )
    return builder.build()


def _pieces(
    blocks: Blocks, line: Line, lengths: dict[str, dict[int, int]]
) -> list[tuple[int, int]]:
    """(number, tokens) of each component, in their order."""
    ids = line.get("hash_ids")
    if not isinstance(ids, dict):
        raise line.wrong("hash_ids is no object of components")
    found = []
    for field, of_field in ids.items():
        if field not in lengths:
            raise line.wrong(f"hash_ids has an unknown component {field!r}")
        known = lengths[field]
        if not isinstance(of_field, list):
            raise line.wrong(f"hash_ids: {field} is no list")
        for one in of_field:
            if type(one) is not int or one not in known:
                raise line.wrong(f"hash_ids: {field} {one!r} is not in its component file")
            found.append((blocks.number((field, one)), known[one]))
    return found


def _contents(
    blocks: Blocks, pieces: list[tuple[int, int]], tokens: int, length: int
) -> Iterator[int]:
    """What names each block beside the blocks before it."""
    held: list[int] = []
    filled = total = 0
    for one, size in pieces:
        size = min(size, length - total)
        total += size
        while size > 0:
            taken = min(size, tokens - filled)
            held.append(one)
            filled += taken
            size -= taken
            if filled == tokens:
                yield blocks.number(tuple(held))
                held, filled = [], 0
    if filled:
        yield blocks.number((*held, -filled))


def _lengths(path: Path, field: str) -> dict[int, int]:
    part, id_field = _COMPONENTS[field]
    files = sorted(path.parent.glob(f"*{part}.jsonl*"))
    if not files:
        raise TraceError(
            f"{path}: no file *{part}.jsonl beside it",
            remedy="keep RAGPulse's component files in the folder of its trace",
        )
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise TraceError(
            f"{path}: several files *{part}.jsonl beside it: {names}",
            remedy="keep one of them in the folder of the trace",
        )
    found: dict[int, int] = {}
    for line in Lines(files[0]):
        one, size = line.count(id_field), line.count("token_length")
        if found.setdefault(one, size) != size:
            raise line.wrong(f"{id_field} {one} has {size} tokens, and had {found[one]}")
    return found
