"""The subcommand `kvtier engine`. Light: everything that needs the extra is loaded when it runs."""

from __future__ import annotations

import argparse
import importlib
import ipaddress
from pathlib import Path

from kvtier_engine.errors import require_extra
from kvtier_engine.server.errors import NetworkUnprotected

__all__ = ["register"]

_PORT_MAX = 65535
_HOST = "where to listen: an address, or a name and all its addresses (default 127.0.0.1)"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser; called by the `kvtier` command through the entry point kvtier.commands."""
    parser = subparsers.add_parser(
        "engine",
        help="serve a model over OpenAI's API, with kvtier as its KV memory",
        description="Serves one model on one host: /v1/completions, /v1/chat/completions,"
        " /v1/models, /health and /metrics. Without --kvtier its cache is the device pool alone.",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a Hugging Face directory or a GGUF file (default: SmolLM2-135M, converted once)",
    )
    parser.add_argument("--name", default="", help="what clients call it (default: its own name)")
    parser.add_argument("--host", default="127.0.0.1", help=_HOST)
    parser.add_argument(
        "--allow-insecure-network",
        action="store_true",
        help="let --host be more than this machine: there are no keys and no encryption",
    )
    parser.add_argument("--port", type=_port, default=8000, help="0 takes any free one")
    parser.add_argument("--kvtier", metavar="URL", help="the daemon below, say unix://PATH")
    parser.add_argument("--tenant", default="default")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--page-tokens", type=_positive, default=64)
    parser.add_argument("--pool-tokens", type=_positive, default=16384, help="KV on the device")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("bf16", "fp8_e4m3"),
        help="the numbers of the pool: fp8_e4m3 holds twice the tokens (default: those of --dtype)",
    )
    parser.add_argument("--queue-requests-max", type=_positive, default=256)
    parser.add_argument("--running-requests-max", type=_positive, default=32)
    parser.add_argument(
        "--kv-integrity",
        choices=("tags", "off"),
        default="tags",
        help="compare the tags of all pages before they are read (default tags)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when it was told to end. Raises KvtierError when it cannot serve."""
    require_extra()
    if not (args.allow_insecure_network or _is_loopback(args.host)):
        raise NetworkUnprotected(
            f"--host {args.host} lets the network in, without keys and without encryption",
            remedy="leave --host out and put a proxy with TLS and keys before it, or add"
            " --allow-insecure-network where everybody who can connect may use the model",
        )
    # Loads torch, which nobody who asks for another command should wait for.
    server = importlib.import_module("kvtier_engine.server.run")
    return int(server.run(args))


def _is_loopback(host: str) -> bool:
    """A name other than localhost may be any address: it is none."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _port(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= _PORT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to {_PORT_MAX}")
    return number


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return number
