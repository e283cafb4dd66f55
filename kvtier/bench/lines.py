"""JSON lines of a file, gzip or not, one at a time; what is wrong with one is named with its line.

One thread. Memory is that of one line.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from kvtier.bench.errors import TraceError

__all__ = ["Line", "Lines", "open_bytes"]

_GZIP: Final = b"\x1f\x8b"
#: A longer line is no request: a million blocks are some ten megabytes.
_LINE_BYTES_MAX: Final = 1 << 28

#: Told how many bytes of the file, as it lies, have been read.
Progress = Callable[[int], None]


class Line:
    """One JSON object and where it stands. `number` 0: the file as a whole."""

    __slots__ = ("fields", "number", "path")

    def __init__(self, path: Path, number: int, fields: Mapping[str, Any]) -> None:
        self.path = path
        self.number = number
        self.fields = fields

    def wrong(self, what: str, remedy: str = "mend the line, or take it out") -> TraceError:
        where = f"{self.path}:{self.number}" if self.number else str(self.path)
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
        is_number = type(value) in (int, float) and math.isfinite(value)
        if not is_number or value < 0:
            raise self.wrong(f"{name} is {_short(self.get(name))}, not a time from 0")
        return float(value)

    def ids(self, name: str) -> list[Any]:
        """A list, whose items are looked at when they are used. Raises TraceError."""
        value = self.get(name)
        if not isinstance(value, list):
            raise self.wrong(f"{name} is {_short(value)}, not a list")
        return value


class Lines:
    """The objects of a file of JSON lines; blank lines are passed over."""

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self._progress = progress

    def __iter__(self) -> Iterator[Line]:
        raw = self.path.open("rb")
        with raw, open_bytes(raw) as file:
            number = 0
            while True:
                number += 1
                try:
                    text = file.readline(_LINE_BYTES_MAX)
                except (OSError, EOFError, zlib.error) as error:
                    raise TraceError(
                        f"{self.path}:{number}: cannot be read: {error}",
                        remedy="the file is cut short or damaged: fetch it again",
                    ) from error
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


def open_bytes(raw: BinaryIO) -> BinaryIO:
    """The content of an open file, unpacked when it is gzip."""
    magic = raw.read(2)
    raw.seek(0)
    if magic == _GZIP:
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)
    return raw


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
