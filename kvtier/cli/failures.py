"""What a command says when it cannot go on: two lines on standard error, and an exit code.

Functions without state: usable from any thread.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Final

from kvtier.errors import KvtierError

__all__ = ["say_error", "say_os_error"]

_REMEDY: Final = {
    errno.ENOENT: "check the path: the file, or the directory that it is to lie in, is not there",
    errno.ENOTDIR: "check the path: a part of it is a file, not a directory",
    errno.EACCES: "run as a user who may, or change the permissions of the file and its directory",
    errno.EPERM: "run as a user who may, or change the permissions of the file and its directory",
    errno.EROFS: "name a file on a file system that can be written to",
    errno.EISDIR: "name a file, not a directory",
    errno.EEXIST: "name another file, or remove this one",
    errno.ENOSPC: "make room there, or name a file on another file system",
    errno.EDQUOT: "make room within the quota, or name a file on another file system",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ELOOP: "check the symbolic links: they lead in a circle",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs: the system has no more open files",
    errno.EIO: "check the disk (kernel log, SMART data)",
    errno.EFBIG: "name a shorter file; --help says how much is taken",
    errno.ETIMEDOUT: "start the program at its other end first, or raise --timeout",
    errno.EBADF: "it is closed: open it (to /dev/null, if nobody wants to read it)",
    errno.ENOMEM: "free memory, or use a smaller file",
}
_REMEDY_ELSE: Final = "see the system's error text"


def say_error(error: KvtierError) -> None:
    print(f"error: {error}", file=sys.stderr)
    print(f"remedy: {error.remedy}", file=sys.stderr)


def say_os_error(error: OSError, *, of_stdout: bool) -> None:
    """An error of a file, by its kind; of standard output, if it names none."""
    elsewhere = "standard output" if of_stdout else "input or output"
    name = os.fsdecode(error.filename or elsewhere)
    why = error.strerror or str(error) or type(error).__name__
    print(f"error: {name}: {why}", file=sys.stderr)
    print(f"remedy: {_REMEDY.get(error.errno or 0, _REMEDY_ELSE)}", file=sys.stderr)
