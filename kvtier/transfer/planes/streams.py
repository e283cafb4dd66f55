"""The run of page bytes of a Put and of a Get: cut into messages, and put together again.

Pages of any size share messages: a large page spans many, many small pages fit one. Page bytes are
copied once each way: on a put into the message, on a get out of the message to where the page goes.

Objects here belong to one call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from kvtier.core.page import NO_SUM, GetCode
from kvtier.errors import DaemonUnavailable
from kvtier.transfer.planes.values import AnnouncedPage, OutgoingPage, PageSink, PutOpening
from kvtier.transfer.wire import GetMessage, encode_put
from kvtier.v1 import transfer_pb2 as pb

__all__ = ["CHUNK_BYTES", "GetRun", "PutRun", "put_messages"]

#: Bytes in one message of a put. Handling a message costs some 0.1 ms whatever its size, so that
#: chunks far below 1 MiB cost speed; far above it a message needs fresh memory from the kernel each
#: time (its pages are then faulted in one by one) and comes near the 4 MiB that servers with stock
#: options accept.
CHUNK_BYTES: Final = 1 << 20

#: About what one announcement takes on the wire; counted against the chunk.
_ANNOUNCEMENT_BYTES: Final = 128

#: Announcements in one message: the daemon takes them in one stretch, some 10 us each.
_PAGES_PER_MESSAGE: Final = 64

#: More than a message has around its pages and their bytes.
_HEAD_BYTES: Final = 1024


def put_messages(
    opening: PutOpening, pages: Iterable[OutgoingPage], chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """The encoded messages of one Put. A page is taken from `pages` when the bytes before it are
    out.
    """
    run = PutRun(opening, chunk_bytes)
    for page in pages:
        yield from run.feed(page)
    yield run.finish()


class PutRun:
    """Takes the pages of one Put and makes its messages."""

    def __init__(self, opening: PutOpening, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = max(min(chunk_bytes, opening.message_bytes_max - _HEAD_BYTES), 1)
        self._head = pb.PutRequest(open=_opening(opening))
        self._pieces: list[memoryview] = []
        self._room = self._chunk_bytes
        self._sent = 0

    def feed(self, page: OutgoingPage) -> Iterator[bytes]:
        """The messages that are full now; take them all before the next page."""
        if len(self._head.pages) >= _PAGES_PER_MESSAGE:
            yield self._message()
        _announce(self._head, page)
        self._room -= _ANNOUNCEMENT_BYTES
        data = page.data
        while len(data) > max(self._room, 0):
            piece = data[: max(self._room, 0)]
            self._pieces.append(piece)
            yield self._message()
            data = data[len(piece) :]
        self._pieces.append(data)
        self._room -= len(data)

    def finish(self) -> bytes:
        """The last message."""
        return encode_put(self._head, self._pieces)

    def _message(self) -> bytes:
        message = encode_put(self._head, self._pieces)
        self._sent += sum(map(len, self._pieces))
        self._head = pb.PutRequest(offset=self._sent)
        self._pieces, self._room = [], self._chunk_bytes
        return message


def _opening(opening: PutOpening) -> pb.PutOpen:
    return pb.PutOpen(
        handle=opening.handle,
        durability=int(opening.durability),  # type: ignore[arg-type]
        session=opening.hints.session,
        ttl_ms=opening.hints.ttl_ms,
        priority=opening.hints.priority,
        traceparent=opening.hints.traceparent,
    )


def _announce(head: pb.PutRequest, page: OutgoingPage) -> None:
    head.pages.add(
        key=page.key,
        length=len(page.data),
        codec=int(page.codec),
        payload_sum=page.payload_sum,
        origin_sum=b"" if page.origin_sum == NO_SUM else page.origin_sum,
        lossy=page.lossy,
        parent=page.parent,
        depth=page.depth,
    )


class GetRun:
    """Takes the messages of one Get's answer and delivers its pages.

    Raises DaemonUnavailable for an answer that breaks the rules of transfer.proto: whoever sends
    that is no daemon to rely on. Pages completed before stay so.
    """

    def __init__(self, sink: PageSink, pages: int) -> None:
        self._sink = sink
        self._pages = pages
        self._announced = 0
        self._received = 0
        self._waiting: deque[tuple[int, int]] = deque()  # (index, length) of hits to come
        self._page: tuple[int, int] | None = None
        self._target: memoryview | None = None
        self._at = 0  # bytes of the present page that were received

    def feed(self, message: GetMessage) -> None:
        for page in message.pages:
            self._announce(
                AnnouncedPage(
                    page.code,
                    page.tier,
                    page.codec,
                    page.lossy,
                    page.length,
                    page.payload_sum,
                    page.origin_sum,
                    page.slot,
                    page.generation,
                )
            )
        data = message.data
        if len(data) and message.offset != self._received:
            raise _broken(f"bytes from {message.offset} came after {self._received}")
        self._received += len(data)
        while len(data):
            data = data[self._take(data) :]

    def finish(self) -> None:
        """The stream has ended well; so must the run."""
        if self._announced != self._pages or self._page is not None or self._waiting:
            raise _broken(f"{self._announced} of {self._pages} pages, some without their bytes")

    def _announce(self, page: AnnouncedPage) -> None:
        index = self._announced
        if index == self._pages:
            raise _broken(f"more than {self._pages} pages")
        self._announced += 1
        self._sink.announce(index, page)
        if page.code != GetCode.HIT:
            return
        if page.length == 0:
            raise _broken(f"page {index} has no bytes")
        self._waiting.append((index, page.length))

    def _take(self, data: memoryview) -> int:
        """Puts bytes of one page in place; how many."""
        if self._page is None:
            if not self._waiting:
                raise _broken("bytes that belong to no page")
            self._page = self._waiting.popleft()
            self._target = self._sink.begin(self._page[0])
            self._at = 0
        index, length = self._page
        count = min(length - self._at, len(data))
        if self._target is not None:
            assert len(self._target) == length, "the sink gives room for the page"
            self._target[self._at : self._at + count] = data[:count]
        self._at += count
        if self._at == length:
            self._page = self._target = None
            self._sink.complete(index)
        return count


def _broken(what: str) -> DaemonUnavailable:
    return DaemonUnavailable(
        f"the answer of the daemon breaks the protocol: {what}",
        remedy="use a client and daemon of the same version; compute the pages meanwhile",
    )
