"""The `kvtier` command.

Promise: an error of kvtier is two lines on standard error (what, and what to do), never a
traceback; exit codes are 0 done, 1 failed, 2 wrong input or configuration, or output that cannot be
written, 130 Ctrl-C, 141 reader gone (what a shell says of a program that SIGPIPE ends). Each
subcommand loads only what it needs; further ones come from other packages (foreign.py).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from kvtier.cli.failures import say_error, say_os_error
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
        code = _run(words)
    except KvtierError as error:
        say_error(error)
        return EXIT_INPUT if isinstance(error, (ConfigError, InvalidInput)) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return EXIT_READER_GONE
    except OSError as error:
        say_os_error(error, of_stdout=_drop_output())
        return EXIT_INPUT
    except UnicodeError as error:
        print(f"error: text that is no UTF-8: {error}", file=sys.stderr)
        print("remedy: check the arguments and the files they name", file=sys.stderr)
        return EXIT_INPUT
    return code


def _run(words: Sequence[str]) -> int:
    """Standard output is written to its end before a command is called done."""
    try:
        arguments = _parser(words).parse_args(words)
        command: Callable[[argparse.Namespace], int] = arguments.run
        code = command(arguments)
    except SystemExit:  # argparse has printed help
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def _drop_output() -> bool:
    """Whether standard output takes nothing. Python flushes it once more at exit: what is left then
    goes nowhere.
    """
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        return False
    fd = sys.stdout.fileno()
    opened = os.open(os.devnull, os.O_WRONLY)
    os.dup2(opened, fd)
    os.close(opened)
    return True


def _open_missing_streams() -> None:
    """A closed standard stream is None to Python, and its descriptor would go to the next file.

    What stands for standard output cannot be written to: output that goes nowhere is an error.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDONLY if fd == 1 else os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            setattr(sys, name, os.fdopen(fd, "r" if fd == 0 else "w", closefd=False))
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        # PYTHONUNBUFFERED: a write without a buffer may take a part, and nobody looks.
        sys.stdout = os.fdopen(
            sys.stdout.fileno(),
            "w",
            buffering=1,
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            closefd=False,
        )


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtier",
        description="KV cache tiering and transfer for LLM inference.",
        epilog="Exit codes: 0 done; 1 failed; 2 wrong input, or a file or standard output that "
        "cannot be read or written; 130 Ctrl-C; 141 the reader of standard output went away.",
    )
    parser.add_argument("--version", action="version", version=f"kvtier {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    word = words[0] if words else None
    # A command that is named is made alone: the parsers of all take longer than what most do. Other
    # packages are loaded only when one of their commands may be meant.
    if word in _BUILT_IN:
        kinds = _BUILT_IN[word](commands)
        if word == "bench":
            add_foreign(BENCHES, kinds, words[1] if len(words) > 1 else None)
    else:
        for register in _BUILT_IN.values():
            register(commands)
        add_foreign(COMMANDS, commands, word)
    return parser
