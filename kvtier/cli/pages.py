"""`kvtier put` and `kvtier get`: a file through the cache and back.

The file becomes opaque pages of `--page-bytes` each (the last one is filled up with zeros), in the
namespace of model "kvtier-file". The run of pages begins with "KVTFILE2", the file's SHA-256, its
length and the bytes of a page (both u64 little-endian). Page 0 has the given key; page i has the
key sha256(sha256(file) || i as u64 little-endian), so pages of two files are never mixed up. Page 0
is stored last. A put under a key that has another file replaces that file (delete, then store; a
get in between is a miss), and says so.

`get` needs the same `--page-bytes` and `--tenant`. It gives back the whole file, checked against
its SHA-256, or fails with exit code 1, and never leaves half a file. Which tier each page came from
goes to standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.options import add_url, daemon_url
from kvtier.config_kinds import Size
from kvtier.errors import NotDurable

if TYPE_CHECKING:
    from kvtier.cli.file_pages import FilePages
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
    content = arguments.file.read_bytes()
    put = _file_pages(arguments).put(content, durable=arguments.durable)
    for code in sorted(set(put.codes)):
        print(f"{code.name.lower():18} {put.codes.count(code)} pages", file=sys.stderr)
    if put.is_replaced:
        print("replaced           another file under this key", file=sys.stderr)
    if not all(code.is_stored for code in put.codes):
        return EXIT_FAILED
    if arguments.durable == "nvme":
        print(f"durable            {put.durable} pages", file=sys.stderr)
        if put.durable < len(put.codes):
            raise NotDurable(
                f"{len(put.codes) - put.durable} of {len(put.codes)} pages are not on NVMe",
                remedy="see the NVMe tier and the warnings in `kvtier status`: put it again when "
                "there is room; a page that is longer than a segment needs a larger nvme.bytes",
            )
    return 0


def _get(arguments: argparse.Namespace) -> int:
    got = _file_pages(arguments).get()
    if isinstance(got, Enum):
        print(f"miss: {got.value} {arguments.key.hex()}", file=sys.stderr)
        return EXIT_FAILED
    for tier, first, last in _runs(got.tiers):
        pages = f"page {first}" if first == last else f"pages {first}-{last}"
        print(f"{tier:18} {pages}", file=sys.stderr)
    if arguments.output is None:
        sys.stdout.buffer.write(got.content)
        return 0
    _write(arguments.output, got.content)
    return 0


def _write(output: Path, content: bytes) -> None:
    """A file is replaced whole or not at all, behind a link too; devices and pipes are written
    to.
    """
    if output.exists() and not output.is_file():
        with output.open("wb") as stream:
            stream.write(content)
        return
    target = output.resolve()
    temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


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
