"""The `kvtier` command.

Promise: an error of kvtier is two lines on standard error (what, and what to do), never a
traceback; exit codes are 0 done, 1 failed, 2 wrong input or configuration, 130 Ctrl-C, 141 reader
gone. Each subcommand loads only what it needs. Further subcommands come from other packages through
the entry-point group `kvtier.commands`: an entry is a function that gets argparse's subparsers,
adds a parser and sets its `run` default to a function from the parsed arguments to an exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
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
from kvtier.errors import ConfigError, InvalidInput, KvtierError

__all__ = ["ENTRY_POINTS", "main"]

ENTRY_POINTS = "kvtier.commands"
EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141

_BUILT_IN = {
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
    for register in _BUILT_IN.values():
        register(commands)
    # Other packages are loaded only when one of their commands may be meant.
    if not words or words[0] not in _BUILT_IN:
        for entry in entry_points(group=ENTRY_POINTS):
            _register_foreign(entry, commands, is_meant=words[:1] == [entry.name])
    return parser


def _register_foreign(entry: Any, commands: Any, *, is_meant: bool) -> None:
    """A package that cannot be loaded hides its own command, and says why only if it was meant."""
    try:
        register = entry.load()
    except ImportError as error:
        if is_meant:
            print(f"error: kvtier {entry.name} cannot be loaded: {error}", file=sys.stderr)
            print("remedy: install its extra, as in pip install 'kvtier[engine]'", file=sys.stderr)
            raise SystemExit(EXIT_FAILED) from error
        return
    register(commands)
