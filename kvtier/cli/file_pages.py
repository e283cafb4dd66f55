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
from typing import Self

from kvtier.client import Namespace, connect
from kvtier.core.page import GetCode, PutCode
from kvtier.errors import Busy, DaemonUnavailable
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment

__all__ = ["FilePages", "Lost"]

_MAGIC = b"KVTFILE2"
_HEAD = struct.Struct("<8s32sQQ")  # magic, SHA-256 of the file, its length, bytes of a page
#: Bytes of one call: a lost page ends a get before much was read in vain.
_RUN_BYTES = 64 << 20
_UNANSWERED = {"UNAVAILABLE", "TIMEOUT"}


class Lost(Enum):
    """Why there is no file to give back; the value says it to the user."""

    NO_HEAD = "nothing is stored under"
    PAGES = "pages are gone of the file under"
    OTHER_BYTES = "the pages are not those of the file that was put under"
    NOT_A_FILE = "what was not made by `kvtier put` is stored under"


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

    def put(self, content: bytes) -> tuple[list[PutCode], bool]:
        """(the outcome of each page, the first one's last; whether another file was replaced).

        The first page is put when all others are there, and left out when they are not. Raises Busy
        when somebody else puts another file under the same key meanwhile.
        """
        size = self._page_bytes
        digest = hashlib.sha256(content).digest()
        head = _Head(digest=digest, length=len(content), page_bytes=size)
        run = (head.pack() + content).ljust(head.count * size, b"\0")
        first = bytearray(run[:size])
        with self._opened() as pages:
            codes: list[PutCode] = []
            for part in head.tail():
                codes += self._put(
                    pages, head.keys(part), run[part.start * size : part.stop * size]
                )
            if not all(code.is_stored for code in codes):
                return codes, False
            code = self._put_first(pages, first)
            is_other = code is None
            if code is None:
                pages.delete([self._key])
                code = self._put_first(pages, first)
            if code is None:
                raise Busy(
                    f"another file was put under {self._key.hex()} at the same time",
                    remedy="Put it again, or under a key of its own.",
                )
            return [*codes, code], is_other

    def get(self) -> bytes | Lost:
        """The file, checked against its SHA-256, or why there is none."""
        with self._opened() as pages:
            first = self._get(pages, [self._key])
            if first is None:
                return Lost.NO_HEAD
            head = _Head.unpack(first)
            if head is None:
                return Lost.NOT_A_FILE
            run = bytearray(first)
            for part in head.tail():
                piece = self._get(pages, head.keys(part))
                if piece is None:
                    return Lost.PAGES
                run += piece
        content = bytes(memoryview(run)[_HEAD.size : _HEAD.size + head.length])
        if hashlib.sha256(content).digest() != head.digest:
            return Lost.OTHER_BYTES
        return content

    def _put_first(self, pages: Namespace, first: bytearray) -> PutCode | None:
        """None: another page has the key (the daemon keeps the page that is there)."""
        (code,) = self._put(pages, [self._key], first)
        if code is PutCode.EXISTS and self._get(pages, [self._key]) != first:
            return None
        return code

    def _put(
        self, pages: Namespace, keys: Sequence[bytes], run: bytes | bytearray
    ) -> list[PutCode]:
        reasons = pages.put(pages.keys_from(keys), run).reasons
        self._check_answered(reasons)
        return reasons

    def _get(self, pages: Namespace, keys: Sequence[bytes]) -> bytearray | None:
        """The pages, one after another; None when one is not there."""
        run = bytearray(len(keys) * self._page_bytes)
        result = pages.get(pages.keys_from(keys), out=run)
        self._check_answered(result.reasons)
        return run if result.prefix == len(keys) else None

    @contextmanager
    def _opened(self) -> Iterator[Namespace]:
        with connect(
            self._url, deadline=self._timeout_s, client_name="kvtier command"
        ) as connection:
            yield connection.namespace(self._layout, tenant=self._tenant)

    def _check_answered(self, reasons: Iterable[PutCode] | Iterable[GetCode]) -> None:
        if {code.name for code in reasons} & _UNANSWERED:
            raise DaemonUnavailable(
                f"the daemon at {self._url} did not answer in time",
                remedy="See that it runs and listens there (kvtier doctor); raise --timeout.",
            )
