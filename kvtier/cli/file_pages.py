"""A file as opaque pages at one daemon; see `pages` for the format. Loads the client.

One thread; each call has connections of its own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import BinaryIO, Self

from kvtier.cli.file_source import Source
from kvtier.cli.options import naming
from kvtier.client import Namespace, PutItem, connect
from kvtier.core.page import GetCode, PutCode, Tier
from kvtier.errors import Busy, DaemonUnavailable, DeadlineExceeded, LimitExceeded
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment

__all__ = ["Fetched", "FilePages", "Lost", "Stored"]

_MAGIC = b"KVTFILE2"
_HEAD = struct.Struct("<8s32sQQ")  # magic, SHA-256 of the file, its length, bytes of a page
#: Bytes of one call: a lost page ends a get before much was read in vain.
_RUN_BYTES = 64 << 20


class Lost(Enum):
    """Why there is no file to give back; the value says it to the user."""

    NO_HEAD = "nothing is stored under"
    PAGES = "pages are gone of the file under"
    OTHER_BYTES = "the pages are not those of the file that was put under"
    NOT_A_FILE = "what was not made by `kvtier put` is stored under"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What became of a put: the outcome of each page, the first one's last; how many of them are
    durable, and how many were there when the last one was stored; whether another file was
    replaced.
    """

    codes: list[PutCode]
    durable: int
    there: int
    is_replaced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A whole file was written to where it was to go; where each of its pages was."""

    tiers: list[Tier]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """What the first bytes of the run say: which file it is."""

    digest: bytes
    length: int
    page_bytes: int

    @classmethod
    def unpack(cls, page: bytes | bytearray) -> Self | None:
        magic, digest, length, page_bytes = _HEAD.unpack_from(page)
        if magic != _MAGIC or page_bytes != len(page):
            return None
        return cls(digest=digest, length=length, page_bytes=page_bytes)

    def pack(self) -> bytes:
        return _HEAD.pack(_MAGIC, self.digest, self.length, self.page_bytes)

    @property
    def count(self) -> int:
        """How many pages hold head and file."""
        return -(-(_HEAD.size + self.length) // self.page_bytes)

    def tail(self) -> Iterator[range]:
        """The numbers of all pages but the first, in runs of about _RUN_BYTES."""
        step = max(1, _RUN_BYTES // self.page_bytes)
        return (range(at, min(at + step, self.count)) for at in range(1, self.count, step))

    def piece(self, pages: range) -> range:
        """Which bytes of the file lie in these pages (those before the file are the head)."""
        start = max(0, pages.start * self.page_bytes - _HEAD.size)
        return range(start, min(pages.stop * self.page_bytes - _HEAD.size, self.length))

    def keys(self, numbers: Iterable[int]) -> list[bytes]:
        """Keys of pages that are not the first: no other file has them."""
        return [
            hashlib.sha256(self.digest + struct.pack("<Q", number)).digest() for number in numbers
        ]


class FilePages:
    """The file of one key at one daemon. Raises KvtierError when the daemon does not answer."""

    def __init__(
        self, url: str, key: bytes, *, page_bytes: int, tenant: str, timeout_s: float
    ) -> None:
        self._url = url
        self._key = key
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._page_bytes = page_bytes
        self._layout = Layout.from_segments(
            [
                Segment(
                    name="bytes",
                    role=Role.OPAQUE,
                    dtype="uint8",
                    layers=1,
                    heads=page_bytes // 1024,
                    dim=1024,
                    scale_rule=ScaleRule.NONE,
                )
            ],
            model_id="kvtier-file",
            revision="2",
            page_tokens=1,
            kv_compute="uint8",
            key_scheme="kvtier-file-2",
        )

    def put(self, source: Source, *, durable: str) -> Stored:
        """The first page is put when all others are there, and left out when they are not. Raises
        Busy when somebody else puts another file under the same key, or writes to this one,
        meanwhile.
        """
        size = self._page_bytes
        blank = _Head(digest=bytes(32), length=source.length, page_bytes=size)
        parts = list(blank.tail())
        digest = source.digest([blank.piece(part) for part in (range(1), *parts)])
        head = _Head(digest=digest, length=source.length, page_bytes=size)
        first = bytearray((head.pack() + source.piece(head.piece(range(1)))).ljust(size, b"\0"))
        with self._opened() as pages:
            items: list[PutItem] = []
            for part in parts:
                piece = source.piece(head.piece(part)).ljust(len(part) * size, b"\0")
                items += self._put(pages, head.keys(part), piece, durable)
            if not all(item.is_stored for item in items):
                return _stored(items, there=0, is_replaced=False)
            item = self._put_first(pages, first, durable)
            is_other = item is None
            if item is None:
                pages.delete([self._key])
                item = self._put_first(pages, first, durable)
            if item is None:
                raise Busy(
                    f"another file was put under {self._key.hex()} at the same time",
                    remedy="Put it again, or under a key of its own.",
                )
            there = self._there(pages, [self._key, *head.keys(range(1, head.count))])
            return _stored([*items, item], there=there, is_replaced=is_other)

    def get(self, target: BinaryIO, *, bytes_max: int | None) -> Fetched | Lost:
        """Writes the file to `target`, and says whether that was the file, by its SHA-256; if it
        was not, what `target` holds is nothing. Raises LimitExceeded when it is longer than
        `bytes_max`.
        """
        tiers: list[Tier] = []
        with self._opened() as pages:
            first = self._get(pages, [self._key], tiers)
            if first is None:
                return Lost.NO_HEAD
            head = _Head.unpack(first)
            if head is None:
                return Lost.NOT_A_FILE
            if bytes_max is not None and head.length > bytes_max:
                raise LimitExceeded(
                    f"the file is {head.length} bytes long, more than {bytes_max} are not held "
                    "back until all of them are checked",
                    remedy="Name a regular file with -o.",
                )
            digest = hashlib.sha256()
            whole = memoryview(first)[_HEAD.size :]
            for part in (range(1), *head.tail()):
                if part.start:
                    more = self._get(pages, head.keys(part), tiers)
                    if more is None:
                        return Lost.PAGES
                    whole = memoryview(more)
                piece = whole[: len(head.piece(part))]
                digest.update(piece)
                target.write(piece)
        return Fetched(tiers=tiers) if digest.digest() == head.digest else Lost.OTHER_BYTES

    def _there(self, pages: Namespace, keys: Sequence[bytes]) -> int:
        """How many of them the daemon has."""
        result = pages.lookup(pages.keys_from(keys))
        self._check_answered(result.reasons)
        return sum(code is GetCode.HIT for code in result.reasons)

    def _put_first(self, pages: Namespace, first: bytearray, durable: str) -> PutItem | None:
        """None: another page has the key (the daemon keeps the page that is there)."""
        (item,) = self._put(pages, [self._key], first, durable)
        if item.reason is PutCode.EXISTS and self._get(pages, [self._key], []) != first:
            return None
        return item

    def _put(
        self, pages: Namespace, keys: Sequence[bytes], run: bytes | bytearray, durable: str
    ) -> list[PutItem]:
        result = pages.put(pages.keys_from(keys), run, durable=durable)
        self._check_answered(result.reasons)
        return list(result)

    def _get(self, pages: Namespace, keys: Sequence[bytes], tiers: list[Tier]) -> bytearray | None:
        """The pages, one after another, and `tiers` grows by where they were; None when one is not
        there.
        """
        run = bytearray(len(keys) * self._page_bytes)
        result = pages.get(pages.keys_from(keys), out=run)
        self._check_answered(result.reasons)
        tiers += [item.tier for item in result if item.tier is not None]
        return run if result.prefix == len(keys) else None

    @contextmanager
    def _opened(self) -> Iterator[Namespace]:
        with (
            naming(self._url, self._timeout_s),
            connect(
                self._url, deadline=self._timeout_s, client_name="kvtier command", plane="grpc"
            ) as connection,
        ):
            yield connection.namespace(self._layout, tenant=self._tenant)

    def _check_answered(self, reasons: Iterable[PutCode] | Iterable[GetCode]) -> None:
        names = {code.name for code in reasons}
        if "TIMEOUT" in names:
            raise DeadlineExceeded("pages have no outcome", remedy="raise --timeout")
        if "UNAVAILABLE" in names:
            raise DaemonUnavailable(
                "pages cannot be asked for", remedy="see that it runs and listens there"
            )


def _stored(items: Sequence[PutItem], *, there: int, is_replaced: bool) -> Stored:
    return Stored(
        codes=[item.reason for item in items],
        durable=sum(item.durable for item in items),
        there=there,
        is_replaced=is_replaced,
    )
