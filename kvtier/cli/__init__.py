"""The `kvtier` command.

Promise: an error of kvtier is two lines on standard error (what, and what to do), never a
traceback; exit codes are 0 done, 1 failed, 2 wrong input or configuration, 130 Ctrl-C, 141 reader
gone. Each subcommand loads only what it needs; further ones come from other packages (foreign.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvtier._version import __version__
from kvtier.cli import (
    bench_command,
    config_command,
    doctor,
    fsck,
    inspect_command,
    metrics_command,
    pages,
    quarantine,
    serve,
    status,
    verify,
)
from kvtier.cli.foreign import BENCHES, COMMANDS, add_foreign
from kvtier.errors import ConfigError, InvalidInput, KvtierError

__all__ = ["main"]

EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141

_BUILT_IN: dict[str, Callable[[Any], Any]] = {
    "serve": serve.register,
    "status": status.register,
    "put": pages.register_put,
    "get": pages.register_get,
    "verify": verify.register,
    "quarantine": quarantine.register,
    "fsck": fsck.register,
    "inspect": inspect_command.register,
    "doctor": doctor.register,
    "config": config_command.register,
    "metrics": metrics_command.register,
    "bench": bench_command.register,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    try:
        arguments = _parser(words).parse_args(words)
        command: Callable[[argparse.Namespace], int] = arguments.run
        code = command(arguments)
        sys.stdout.flush()
    except KvtierError as error:
        print(f"error: {error}", file=sys.stderr)
        print(f"remedy: {error.remedy}", file=sys.stderr)
        return EXIT_INPUT if isinstance(error, (ConfigError, InvalidInput)) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_READER_GONE
    except OSError as error:
        what = error.filename or "input or output"
        print(f"error: {os.fsdecode(what)}: {error.strerror}", file=sys.stderr)
        print("remedy: name a file that can be read or written, with room", file=sys.stderr)
        return EXIT_INPUT
    except UnicodeError as error:
        print(f"error: text that is no UTF-8: {error}", file=sys.stderr)
        print("remedy: check the arguments and the files they name", file=sys.stderr)
        return EXIT_INPUT
    return code


def _open_missing_streams() -> None:
    """A closed standard stream is None to Python, and its descriptor would go to the next file."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            setattr(sys, name, os.fdopen(fd, "r" if fd == 0 else "w", closefd=False))


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtier", description="KV cache tiering and transfer for LLM inference."
    )
    parser.add_argument("--version", action="version", version=f"kvtier {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    kinds = {name: register(commands) for name, register in _BUILT_IN.items()}
    # Other packages are loaded only when one of their commands may be meant.
    word = words[0] if words else None
    if word == "bench":
        add_foreign(BENCHES, kinds[word], words[1] if len(words) > 1 else None)
    elif word not in _BUILT_IN:
        add_foreign(COMMANDS, commands, word)
    return parser
