"""What a configuration value may be: each kind parses, names its range and writes itself as TOML.

A kind gets a value either as TOML gave it (`parse`) or as text from the environment or the command
line (`parse_text`), and raises ValueError with the reason. It never clamps or rounds: a value
outside the range is refused.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Generic, Protocol, TypeVar

__all__ = [
    "Choice",
    "Directories",
    "Directory",
    "Kind",
    "ListenAddress",
    "ListenAddresses",
    "MetricsAddress",
    "Seconds",
    "Size",
    "Whole",
    "parse_listen",
    "rounded_size_text",
    "size_text",
]

T = TypeVar("T")
E = TypeVar("E", bound=Enum)

_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")
_SIZE = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


class Kind(Protocol[T]):
    """One kind of value. `allowed` is for people: it ends the sentence "allowed: ..."."""

    @property
    def unit(self) -> str: ...
    @property
    def allowed(self) -> str: ...
    def parse(self, raw: object) -> T: ...
    def parse_text(self, text: str) -> T: ...
    def to_toml(self, value: T) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A whole number from `low` to `high`, both included."""

    low: int
    high: int
    unit: str = ""

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def parse(self, raw: object) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int):
            raise ValueError(f"not a whole number ({type(raw).__name__})")
        return _within(raw, self.low, self.high)

    def parse_text(self, text: str) -> int:
        if not _WHOLE.fullmatch(text.strip()):
            raise ValueError("not a whole number")
        return _within(_whole_of(text), self.low, self.high)

    def to_toml(self, value: int) -> str:
        return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """A time in seconds, whole or decimal."""

    low: float
    high: float
    unit: str = "s"

    @property
    def allowed(self) -> str:
        return f"seconds from {self.low:g} to {self.high:g}"

    def parse(self, raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, (int, float)):
            raise ValueError(f"not a number ({type(raw).__name__})")
        return self._checked(float(raw))

    def parse_text(self, text: str) -> float:
        if not _DECIMAL.fullmatch(text.strip()):
            raise ValueError("not a number")
        return self._checked(float(text))

    def _checked(self, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("not a finite number")
        if not self.low <= value <= self.high:
            raise ValueError("out of range")
        return value

    def to_toml(self, value: float) -> str:
        return f"{value!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A number of bytes: a whole number, or text such as "4GiB", "10 GB", "512 MiB"."""

    low: int
    high: int
    unit: str = "bytes"

    @property
    def allowed(self) -> str:
        return f"{size_text(self.low)} to {size_text(self.high)} (bytes, or text as 512MiB or 10GB)"

    def parse(self, raw: object) -> int:
        if isinstance(raw, str):
            return self.parse_text(raw)
        if isinstance(raw, bool) or not isinstance(raw, int):
            raise ValueError(f"not a size ({type(raw).__name__})")
        return _within(raw, self.low, self.high)

    def parse_text(self, text: str) -> int:
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise ValueError("not a size")
        number, unit = match.groups()
        factor = _SIZE_UNITS.get(unit.lower())
        if factor is None:
            raise ValueError(f"{unit!r} is no unit of size (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)")
        whole, _, decimals = number.partition(".")
        scaled = _whole_of(whole + decimals) * factor
        value, rest = divmod(scaled, 10 ** len(decimals))
        if rest:
            raise ValueError("not a whole number of bytes")
        return _within(value, self.low, self.high)

    def to_toml(self, value: int) -> str:
        text = size_text(value)
        return text if text.isdecimal() else json.dumps(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[E]):
    """One member of an enum, written as its value."""

    members: type[E]
    unit: str = ""

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(str(member.value) for member in self.members)

    def parse(self, raw: object) -> E:
        for member in self.members:
            if raw == member.value:
                return member
        raise ValueError("not one of the choices")

    def parse_text(self, text: str) -> E:
        return self.parse(text.strip())

    def to_toml(self, value: E) -> str:
        return json.dumps(value.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """An absolute path."""

    unit: str = ""
    allowed: str = "an absolute path"

    def parse(self, raw: object) -> Path:
        if not isinstance(raw, str):
            raise ValueError(f"not a path ({type(raw).__name__})")
        if "\0" in raw or not raw.startswith("/"):
            raise ValueError("not an absolute path")
        if not raw.isascii() and any("\ud800" <= letter <= "\udfff" for letter in raw):
            raise ValueError("not UTF-8 text")
        return Path(raw)

    def parse_text(self, text: str) -> Path:
        return self.parse(text)

    def to_toml(self, value: Path) -> str:
        return _toml_text(str(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Directories:
    """Absolute paths, none twice; the list may be empty. As text: separated by commas."""

    items_max: int
    unit: str = ""

    @property
    def allowed(self) -> str:
        return f"a list of up to {self.items_max} absolute paths"

    def parse(self, raw: object) -> tuple[Path, ...]:
        if not isinstance(raw, list):
            raise ValueError(f"not a list ({type(raw).__name__})")
        paths = tuple(Directory().parse(item) for item in raw)
        if len(paths) > self.items_max:
            raise ValueError(f"{len(paths)} paths")
        if len({Path(os.path.normpath(path)) for path in paths}) != len(paths):
            raise ValueError("a path is there twice")
        return paths

    def parse_text(self, text: str) -> tuple[Path, ...]:
        return self.parse([item.strip() for item in text.split(",")] if text.strip() else [])

    def to_toml(self, value: tuple[Path, ...]) -> str:
        return "[" + ", ".join(_toml_text(str(path)) for path in value) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """A parsed `daemon.listen` entry: a unix socket path, or a loopback host and port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def grpc_target(self) -> str:
        """The address in gRPC's own syntax."""
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def url(self, port: int | None = None) -> str:
        """The address as a client writes it; `port` replaces a configured port of 0."""
        if self.path is not None:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"grpc://{host}:{self.port if port is None else port}"


def parse_listen(text: str) -> ListenAddress:
    """Raises ValueError for anything but unix:///absolute/path or grpc://LOOPBACK:PORT."""
    if text.startswith("unix://"):
        path = text.removeprefix("unix://")
        if not path.startswith("/") or "\0" in path or path.endswith("/"):
            raise ValueError("a unix address is unix:///absolute/path")
        if len(path.encode()) > 100:
            raise ValueError("a socket path has at most 100 bytes")
        return ListenAddress(path=Path(path))
    if text.startswith("grpc://"):
        host, port = _host_port(text.removeprefix("grpc://"))
        return ListenAddress(host=host, port=port)
    raise ValueError(f"{text!r} is neither unix:///path nor grpc://127.0.0.1:port")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddresses:
    """At least one address to listen on, none twice. As text: separated by commas."""

    unit: str = ""
    allowed: str = (
        "a list of unix:///absolute/path and grpc://127.0.0.1:port "
        "(loopback only: TLS and tokens are not there yet)"
    )

    def parse(self, raw: object) -> tuple[str, ...]:
        if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
            raise ValueError("not a list of text")
        items = tuple(str(item) for item in raw)
        if not items:
            raise ValueError("the list is empty")
        if len(set(items)) != len(items):
            raise ValueError("an address is there twice")
        for item in items:
            parse_listen(item)
        return items

    def parse_text(self, text: str) -> tuple[str, ...]:
        return self.parse([item.strip() for item in text.split(",")])

    def to_toml(self, value: tuple[str, ...]) -> str:
        return json.dumps(list(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAddress:
    """Empty (off), or a loopback host and port; port 0 takes a free one."""

    unit: str = ""
    allowed: str = "empty text for off, or 127.0.0.1:port (loopback only)"

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str):
            raise ValueError(f"not text ({type(raw).__name__})")
        if raw:
            _host_port(raw)
        return raw

    def parse_text(self, text: str) -> str:
        return self.parse(text.strip())

    def to_toml(self, value: str) -> str:
        return json.dumps(value)


def size_text(value: int) -> str:
    """The shortest exact text of a number of bytes: 4GiB, 10GB, 4097."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= factor and value % factor == 0:
            return f"{value // factor}{unit}"
    return str(value)


def rounded_size_text(value: int) -> str:
    """For people: with at most one decimal, 1.5GiB, 512MiB."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= factor:
            return f"{value / factor:.1f}".removesuffix(".0") + unit
    return f"{value}B"


def _toml_text(value: str) -> str:
    """A basic string. TOML takes JSON's escapes, but no pairs of surrogates and no bare DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _whole_of(text: str) -> int:
    # int() refuses very long text by itself with a message about interpreter settings.
    if len(text) > 40:
        raise ValueError("out of range")
    return int(text)


def _within(value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ValueError("out of range")
    return value


def _host_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError("a TCP address is host:port with a port from 0 to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if host != "localhost":
        try:
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            raise ValueError(
                f"{host!r} is not a loopback address; TLS and tokens are not there yet, "
                "so only loopback and unix sockets are served"
            )
    return host, int(port)
