"""The options that say how many bytes of KV a token has, for the kinds of `kvtier bench`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

from kvtier.bench.errors import BenchInput
from kvtier.bench.models import KvDtype, bytes_per_token, layout_bytes_per_token
from kvtier.streams import TooLong, read_bytes

__all__ = ["model_name", "token_bytes"]

_TOKEN_BYTES_MAX: Final = 1 << 40
_CONFIG_BYTES_MAX: Final = 1 << 24
_SILENCE_S: Final = 5.0  # of the other end of a pipe


def token_bytes(arguments: argparse.Namespace) -> int | None:
    """From --model or --layout with --kv-dtype, or --bytes-per-token; None: nothing was named.
    Raises BenchInput."""
    given: int | None = arguments.bytes_per_token
    named = arguments.model is not None or arguments.layout is not None
    if arguments.kv_dtype is not None and not named:
        raise BenchInput(
            "--kv-dtype needs --model or --layout", remedy="name a model, or leave it out"
        )
    if arguments.model is not None and arguments.layout is not None:
        raise BenchInput("--layout stands beside --model", remedy="give one of the two")
    if given is not None:
        if named or not 1 <= given < _TOKEN_BYTES_MAX:
            other = "--model" if arguments.model is not None else "--layout"
            what = f"stands beside {other}" if named else f"is {_short(given)}"
            raise BenchInput(
                f"--bytes-per-token {what}", remedy="give one of the two, from 1 to 2^40"
            )
        return given
    dtype = KvDtype(arguments.kv_dtype or "bf16")
    if arguments.layout is not None:
        return layout_bytes_per_token(_config(arguments.layout), dtype)
    return None if arguments.model is None else bytes_per_token(arguments.model, dtype)


def model_name(arguments: argparse.Namespace) -> str | None:
    """As it was named."""
    layout: Path | None = arguments.layout
    name: str | None = arguments.model
    return name if layout is None else str(layout)


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    remedy = "name the config.json of a Hugging Face model, or its folder"
    try:
        content = read_bytes(file, bytes_max=_CONFIG_BYTES_MAX, silence_s=_SILENCE_S)
    except TooLong as error:
        raise BenchInput(f"{file}: too large for a config.json", remedy=remedy) from error
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BenchInput(f"{file}: no JSON object", remedy=remedy) from error
    if not isinstance(found, dict):
        raise BenchInput(f"{file}: no JSON object", remedy=remedy)
    return found


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
