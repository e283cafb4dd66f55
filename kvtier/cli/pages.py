"""`kvtier put` and `kvtier get`: a file through the cache and back.

The file becomes opaque pages of `--page-bytes` each (the last one is filled up with zeros), in the
namespace of model "kvtier-file". The run of pages begins with "KVTFILE2", the file's SHA-256, its
length and the bytes of a page (both u64 little-endian). Page 0 has the given key; page i has the
key sha256(sha256(file) || i as u64 little-endian), so pages of two files are never mixed up. Page 0
is stored last. A put under a key that has another file replaces that file (delete, then store; a
get in between is a miss), and says so. A put whose pages have to give way again before it ends (the
file is larger than the tiers) fails with exit code 1.

`get` needs the same `--page-bytes` and `--tenant`. It gives back the whole file, checked against
its SHA-256, or fails with exit code 1 (2: it cannot be written; 141: the reader of standard output
went away), and never leaves half a file. Which tier each page came from goes to standard error.

A regular file may be larger than memory. Of a pipe or device up to 1 GiB is taken, and as much is
given back to one. A named pipe that nobody has opened at its other end, or through which nothing
comes, ends the command after `--timeout`.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.options import add_url, daemon_url
from kvtier.config.kinds import Size
from kvtier.errors import Busy, NotDurable
from kvtier.streams import opened_writer, write_all

if TYPE_CHECKING:
    from kvtier.cli.file_pages import Fetched, FilePages, Lost
    from kvtier.core.page import Tier

__all__ = ["register_get", "register_put"]

EXIT_FAILED = 1
_KEY = re.compile(r"[0-9a-fA-F]{64}")
_PAGE_BYTES = Size(low=1 << 10, high=64 << 20)


def register_put(commands: Any) -> None:
    """Adds `kvtier put`."""
    parser = commands.add_parser("put", help="store a file as pages", description=__doc__)
    _add_place(parser)
    parser.add_argument(
        "--durable",
        choices=("host", "nvme"),
        default="host",
        help="nvme: wait until the file survives the daemon, and fail where it does not",
    )
    parser.add_argument("file", type=Path)
    parser.set_defaults(run=_put)


def register_get(commands: Any) -> None:
    """Adds `kvtier get`."""
    parser = commands.add_parser("get", help="fetch a file that was put", description=__doc__)
    _add_place(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="else standard output")
    parser.set_defaults(run=_get)


def _add_place(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    key = parser.add_mutually_exclusive_group(required=True)
    key.add_argument(
        "--key", dest="key", type=_key, metavar="HEX", help="the key, 64 hexadecimal digits"
    )
    key.add_argument(
        "--key-of",
        dest="key",
        type=_key_of,
        metavar="TEXT",
        help="the SHA-256 of this text is the key",
    )
    parser.add_argument(
        "--page-bytes",
        type=_page_bytes,
        default="1MiB",
        metavar="SIZE",
        help="a multiple of 1 KiB (%(default)s)",
    )
    parser.add_argument("--tenant", default="default")


def _key(text: str) -> bytes:
    if not _KEY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 64 hexadecimal digits")
    return bytes.fromhex(text)


def _key_of(text: str) -> bytes:
    return hashlib.sha256(os.fsencode(text)).digest()


def _page_bytes(text: str) -> int:
    try:
        size = _PAGE_BYTES.parse_text(text)
    except ValueError as error:
        message = f"{text!r}: {error}; allowed: {_PAGE_BYTES.allowed}"
        raise argparse.ArgumentTypeError(message) from None
    if size % 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of 1 KiB")
    return size


def _put(arguments: argparse.Namespace) -> int:
    from kvtier.cli.file_source import opened_source

    with opened_source(arguments.file, silence_s=arguments.timeout) as source:
        put = _file_pages(arguments).put(source, durable=arguments.durable)
    for code in sorted(set(put.codes)):
        print(f"{code.name.lower():18} {put.codes.count(code)} pages", file=sys.stderr)
    if put.is_replaced:
        print("replaced           another file under this key", file=sys.stderr)
    if not all(code.is_stored for code in put.codes):
        return EXIT_FAILED
    count = len(put.codes)
    if arguments.durable == "nvme":
        print(f"durable            {put.durable} pages", file=sys.stderr)
        if put.durable < count:
            raise NotDurable(
                f"{count - put.durable} of {count} pages are not on NVMe",
                remedy="see the NVMe tier and the warnings in `kvtier status`: put it again when "
                "there is room; a page that is longer than a segment needs a larger nvme.bytes",
            )
    if put.there < count:
        print(f"there              {put.there} pages", file=sys.stderr)
        raise Busy(
            f"{count - put.there} of {count} pages had to give way again: get will find no file",
            remedy="compare the file with the tiers in `kvtier status`; raise host.bytes or "
            "nvme.bytes",
        )
    return 0


def _get(arguments: argparse.Namespace) -> int:
    from kvtier.cli.file_source import STREAM_BYTES_MAX

    pages = _file_pages(arguments)
    output: Path | None = arguments.output
    if output is not None and (output.is_file() or not output.exists()):
        return _get_to_file(arguments, pages, output.resolve())
    if output is not None and output.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(output))
    whole = io.BytesIO()
    got = pages.get(whole, bytes_max=STREAM_BYTES_MAX)
    if not _is_found(arguments, got):
        return EXIT_FAILED
    if output is None:
        sys.stdout.flush()
        # Not by its buffer, which may be none and then writes a part.
        write_all(sys.stdout.fileno(), whole.getbuffer(), name="standard output", silence_s=None)
        return 0
    with opened_writer(output, silence_s=arguments.timeout) as fd:
        write_all(fd, whole.getbuffer(), name=str(output), silence_s=arguments.timeout)
    return 0


def _get_to_file(arguments: argparse.Namespace, pages: FilePages, target: Path) -> int:
    """A file is replaced whole or not at all, behind a link too."""
    temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            got = pages.get(file, bytes_max=None)
        if not _is_found(arguments, got):
            return EXIT_FAILED
        temporary.replace(target)
    except OSError as error:
        # The file that was asked for, not the one that we write to meanwhile.
        raise OSError(error.errno, error.strerror, str(arguments.output)) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return 0


def _is_found(arguments: argparse.Namespace, got: Fetched | Lost) -> bool:
    """Says what was found, or why nothing was."""
    if isinstance(got, Enum):
        print(f"miss: {got.value} {arguments.key.hex()}", file=sys.stderr)
        return False
    for tier, first, last in _runs(got.tiers):
        pages = f"page {first}" if first == last else f"pages {first}-{last}"
        print(f"{tier:18} {pages}", file=sys.stderr)
    return True


def _runs(tiers: Sequence[Tier]) -> Iterator[tuple[str, int, int]]:
    """(tier, number of the first page, number of the last) of each run of pages in one tier."""
    at = 0
    for tier, run in groupby(tiers):
        count = len(list(run))
        yield tier.name.lower(), at, at + count - 1
        at += count


def _file_pages(arguments: argparse.Namespace) -> FilePages:
    from kvtier.cli.file_pages import FilePages

    return FilePages(
        daemon_url(arguments),
        arguments.key,
        page_bytes=arguments.page_bytes,
        tenant=arguments.tenant,
        timeout_s=arguments.timeout,
    )
