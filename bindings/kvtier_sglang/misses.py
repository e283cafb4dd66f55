"""What each of SGLang's calls is answered with when there is nothing to answer, or an error.

Pure functions that take whatever the call was given; any thread. Importing this loads SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier_sglang.sglang_api import PoolTransfer, PoolTransferResult, transfer_result

__all__ = [
    "all_absent",
    "all_missed",
    "none_moved",
    "none_there",
    "not_one",
    "nothing",
    "refused",
]


def nothing(*_args: object, **_options: object) -> None:
    return None


def not_one(*_args: object, **_options: object) -> int:
    return 0


def refused(*_args: object, **_options: object) -> bool:
    return False


def all_missed(keys: Sequence[str], *_args: object, **_options: object) -> list[bool]:
    return [False] * len(keys)


def all_absent(keys: Sequence[str], *_args: object, **_options: object) -> list[Any]:
    return [None] * len(keys)


def none_moved(transfers: Sequence[PoolTransfer], *_args: object, **_options: object) -> Any:
    # An answer that leaves a pool out would count as one that limits nothing.
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


def none_there(*_args: object, **_options: object) -> PoolTransferResult:
    return transfer_result(0, {}, [])
