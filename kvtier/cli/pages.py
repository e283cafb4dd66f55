"""`kvtier put` and `kvtier get`: a file through the cache and back.

The file becomes a chain of opaque pages of `--page-bytes` each (the last one is filled up with
zeros), in the namespace of model "kvtier-file". Page 0 has the given key, page i the key
sha256(key || i as u32 little-endian). The run of pages begins with 16 bytes: "KVTFILE1" and the
file's length as u64 little-endian. `get` needs the same `--page-bytes` and `--tenant`, gives back
the whole file or fails, and never leaves half a file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.options import add_url, daemon_url
from kvtier.config_kinds import Size

if TYPE_CHECKING:
    from kvtier.cli.file_pages import FilePages

__all__ = ["register_get", "register_put"]

EXIT_FAILED = 1
_KEY = re.compile(r"[0-9a-fA-F]{64}")
_HEAD = struct.Struct("<8sQ")
_MAGIC = b"KVTFILE1"
_PAGE_BYTES = Size(low=1 << 10, high=64 << 20)


def register_put(commands: Any) -> None:
    parser = commands.add_parser("put", help="store a file as pages", description=__doc__)
    _add_place(parser)
    parser.add_argument("file", type=Path)
    parser.set_defaults(run=_put)


def register_get(commands: Any) -> None:
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
    return hashlib.sha256(text.encode()).digest()


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
    run = _HEAD.pack(_MAGIC, len(content)) + content
    codes = _file_pages(arguments).put(run, arguments.timeout)
    for code in sorted(set(codes)):
        print(f"{code.name.lower():18} {codes.count(code)} pages", file=sys.stderr)
    return 0 if all(code.is_stored for code in codes) else EXIT_FAILED


def _get(arguments: argparse.Namespace) -> int:
    pages = _file_pages(arguments)
    first = pages.get(0, 1, arguments.timeout)
    if first is None:
        return _missed(arguments)
    magic, length = _HEAD.unpack_from(first)
    if magic != _MAGIC:
        print("error: the page under this key was not made by `kvtier put`", file=sys.stderr)
        print("remedy: name the key of a file that was put", file=sys.stderr)
        return EXIT_FAILED
    count = -(-(_HEAD.size + length) // pages.page_bytes)
    rest = pages.get(1, count, arguments.timeout) if count > 1 else b""
    if rest is None:
        return _missed(arguments)
    content = (first + rest)[_HEAD.size : _HEAD.size + length]
    if arguments.output is None:
        sys.stdout.buffer.write(content)
        return 0
    temporary = arguments.output.with_name(f"{arguments.output.name}.{os.getpid()}.part")
    temporary.write_bytes(content)
    temporary.replace(arguments.output)
    return 0


def _missed(arguments: argparse.Namespace) -> int:
    print(f"miss: not every page of {arguments.key.hex()} is there", file=sys.stderr)
    return EXIT_FAILED


def _file_pages(arguments: argparse.Namespace) -> FilePages:
    from kvtier.cli.file_pages import FilePages

    return FilePages(
        daemon_url(arguments),
        arguments.key,
        page_bytes=arguments.page_bytes,
        tenant=arguments.tenant,
    )
