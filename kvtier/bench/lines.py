"""JSON lines of a file, gzip or not, one at a time; what is wrong with one is named with its line.

One thread. Memory is that of one line.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from kvtier.bench.errors import TraceError

__all__ = ["Line", "Lines", "Progress", "first_bytes", "whole_file"]

_GZIP: Final = b"\x1f\x8b"
#: A longer line is no request: a million blocks are some ten megabytes.
_LINE_BYTES_MAX: Final = 1 << 28
#: Above any clock's ticks, below where sums of times would lose them.
_TICKS_MAX: Final = 1 << 63
_DAMAGE: Final = (OSError, EOFError, zlib.error)
_FETCH_AGAIN: Final = "the file is cut short or damaged: fetch it again"

#: Told how many bytes of the file, as it lies, have been read.
Progress = Callable[[int], None]


class Line:
    """One JSON object and where it stands. `number` 0: the file as a whole; `inside`: where in
    that line or file, as "requests[3]"."""

    __slots__ = ("fields", "inside", "number", "path")

    def __init__(
        self, path: Path, number: int, fields: Mapping[str, Any], *, inside: str = ""
    ) -> None:
        self.path = path
        self.number = number
        self.fields = fields
        self.inside = inside

    def entry(self, name: str, at: int, fields: Mapping[str, Any]) -> Line:
        """The object at this index of the list of this name."""
        inside = f"{self.inside}.{name}[{at}]" if self.inside else f"{name}[{at}]"
        return Line(self.path, self.number, fields, inside=inside)

    def wrong(self, what: str, remedy: str = "mend the line, or take it out") -> TraceError:
        where = f"{self.path}:{self.number}" if self.number else str(self.path)
        if self.inside:
            where = f"{where}: {self.inside}"
        return TraceError(f"{where}: {what}", remedy=remedy)

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def get(self, name: str) -> Any:
        """Raises TraceError when the line has no such field."""
        try:
            return self.fields[name]
        except KeyError:
            raise self.wrong(f"no field {name!r}") from None

    def count(self, name: str, least: int = 0) -> int:
        """A whole number. Raises TraceError for anything else."""
        value = self.get(name)
        if type(value) is not int or not least <= value < 1 << 40:
            raise self.wrong(f"{name} is {_short(value)}, not a whole number from {least}")
        return value

    def seconds(self, name: str) -> float:
        """A time, as a number or as text of one. Raises TraceError for anything else."""
        value = self.get(name)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                value = math.nan
        # A whole number may have more digits than a float can; nan is in no range.
        if type(value) not in (int, float) or not 0 <= value < _TICKS_MAX:
            raise self.wrong(f"{name} is {_short(self.get(name))}, not a time from 0")
        return float(value)

    def name(self, name: str) -> Hashable:
        """A whole number or text. Raises TraceError for anything else."""
        value = self.get(name)
        if type(value) not in (int, str):
            raise self.wrong(f"{name} is {_short(value)}, neither a whole number nor text")
        found: Hashable = value
        return found

    def tokens(self, name: str, *, blocks: int, block_tokens: int, remedy: str = "") -> int:
        """A count of tokens that so many blocks hold, give or take one. Raises TraceError."""
        length = self.count(name)
        if abs(blocks * block_tokens - length) > block_tokens:
            what = f"{blocks} blocks of {block_tokens} tokens do not fit {name} {length}"
            raise self.wrong(what, remedy or "mend the line, or take it out")
        return length

    def ids(self, name: str) -> list[Any]:
        """A list, whose items are looked at when they are used. Raises TraceError."""
        value = self.get(name)
        if not isinstance(value, list):
            raise self.wrong(f"{name} is {_short(value)}, not a list")
        return value

    def whole_ids(self, name: str) -> list[int]:
        """A list of whole numbers of 64 bits, with a sign or without. Raises TraceError."""
        value = self.ids(name)
        if not set(map(type, value)) <= {int}:
            raise self.wrong(f"{name} has an id that is no whole number")
        if value and not -(1 << 63) <= min(value) <= max(value) < 1 << 64:
            raise self.wrong(f"{name} has an id of more than 64 bits")
        return value


class Lines:
    """The objects of a file of JSON lines; blank lines are passed over."""

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self._progress = progress

    def __iter__(self) -> Iterator[Line]:
        raw = self.path.open("rb")
        with raw, _unpacked(raw) as file:
            number = 0
            while True:
                number += 1
                try:
                    text = file.readline(_LINE_BYTES_MAX)
                except _DAMAGE as error:
                    raise _damaged(f"{self.path}:{number}", error) from error
                if not text:
                    return
                if self._progress is not None and number % 256 == 0:
                    self._progress(raw.tell())
                if not text.isspace():
                    yield self._line(number, text)

    def _line(self, number: int, text: bytes) -> Line:
        line = Line(self.path, number, {})
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise line.wrong(f"no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise line.wrong(f"{_short(fields)}, not a JSON object")
        return Line(self.path, number, fields)


def first_bytes(path: Path) -> bytes:
    """The first line of a file, as it is. Raises TraceError for a damaged file."""
    with path.open("rb") as raw, _unpacked(raw) as file:
        try:
            return file.readline(_LINE_BYTES_MAX)
        except _DAMAGE as error:
            raise _damaged(str(path), error) from error


def whole_file(path: Path) -> Line:
    """A file that is one object on several lines. Raises TraceError for anything else."""
    with path.open("rb") as raw, _unpacked(raw) as file:
        try:
            fields = json.load(file)
        except json.JSONDecodeError as error:
            raise Line(path, error.lineno, {}).wrong(f"no JSON: {error.msg}") from error
        except _DAMAGE as error:
            raise _damaged(str(path), error) from error
        except (ValueError, RecursionError) as error:
            raise Line(path, 0, {}).wrong(f"no JSON: {error}", "name a trace") from error
    if not isinstance(fields, dict):
        raise Line(path, 0, {}).wrong(f"{_short(fields)}, not a JSON object", "name a trace")
    return Line(path, 0, fields)


def _damaged(where: str, error: Exception) -> TraceError:
    return TraceError(f"{where}: cannot be read: {error}", remedy=_FETCH_AGAIN)


def _unpacked(raw: BinaryIO) -> BinaryIO:
    """The content of an open file, unpacked when it is gzip."""
    magic = raw.read(2)
    raw.seek(0)
    if magic == _GZIP:
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)
    return raw


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
