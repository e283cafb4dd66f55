"""The subcommand `kvtier chat`. Needs no extra: the model is elsewhere."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
import uuid
from collections.abc import Iterator
from importlib.util import find_spec

from kvtier.config import process_environment
from kvtier_engine.chat.client import Asking, ChatServer
from kvtier_engine.chat.conversation import Conversation
from kvtier_engine.chat.harmless import line

__all__ = ["register"]

_CONNECT_SECONDS_MAX = 5.0
_EXIT_FAILED = 1
_URL = "http://127.0.0.1:8000"
_KEY_VARIABLE = "OPENAI_API_KEY"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser; called by the `kvtier` command through the entry point kvtier.commands."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model that `kvtier engine` serves",
        description="Each line is said to the model; its answer is shown as it comes, then how"
        " many tokens of the prompt came from which tier. /reset forgets what was said, /quit or"
        " the end of the input ends, Ctrl-C stops an answer. Works through a pipe as well; then"
        " it ends with 1 if an answer failed.",
    )
    parser.add_argument("--url", help=f"the server (default {_URL})")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="the server's key; better in OPENAI_API_KEY, where other users of the machine do not"
        " see it, and which is sent to a server that --url names",
    )
    parser.add_argument("--model", default="", help="which of its models (default: the first)")
    parser.add_argument("--temperature", type=float, default=0.7, help="default %(default)s")
    parser.add_argument("--max-tokens", type=int, default=256, help="a turn (default %(default)s)")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="how long a first token may take, and each after it (default 120)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0, or 1 when an answer failed and nobody was there to see it. Raises KvtierError when there
    is no server to talk to.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What one side cannot say in its encoding is no end of the conversation.
            stream.reconfigure(errors="replace")
    server = ChatServer(
        args.url or _URL,
        connect_seconds_max=_CONNECT_SECONDS_MAX,
        silence_seconds_max=args.timeout,
        key=_key(args),
    )
    asking = Asking(
        model=args.model or server.model(),
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        user=f"chat-{uuid.uuid4().hex}",
    )
    conversation = Conversation(server, asking, sys.stdout, sys.stderr)
    is_person = sys.stdin.isatty()
    if is_person:
        sys.stdout.write(f"{line(asking.model)} at {server.url}; /help says what else there is\n")
    conversation.hold(_typed() if is_person else sys.stdin)
    return 0 if is_person or not conversation.failures else _EXIT_FAILED


def _key(args: argparse.Namespace) -> str:
    """A key in the environment is somebody's: it does not go to whoever listens by default."""
    if args.api_key is not None or args.url is None:
        return args.api_key or ""
    return process_environment().get(_KEY_VARIABLE, "").strip()


def _typed() -> Iterator[str]:
    """What a person types, until Ctrl-D."""
    if find_spec("readline") is not None:
        importlib.import_module("readline")  # lets `input` edit lines, and recall them
    try:
        while True:
            yield input("> ")
    except EOFError:
        sys.stdout.write("\n")


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds below 1000000")
    return number
