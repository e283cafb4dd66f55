"""Keys of pages, and chains of them that remember what came before.

`chain[n:]` is still a chain: it knows that chain[n - 1] is the parent of its first page and how
deep it begins, so `ns.put(keys[got.prefix:], pages)` tells the daemon where in the conversation
those pages belong.

Immutable: usable from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast, overload

from kvtier.core.page import KEY_BYTES
from kvtier.core.page_columns import cut
from kvtier.errors import KeyLengthError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["KeyChain", "checked_keys", "keys_of_hashes"]


class KeyChain(Sequence[bytes]):
    """32-byte keys, each the child of the one before it.

    `parent` is the key before the first one (empty at the head of a conversation), `depth` the
    pages before it.
    """

    __slots__ = ("_keys", "depth", "parent")

    def __init__(self, keys: Iterable[bytes], *, parent: bytes = b"", depth: int = 0) -> None:
        self._keys = tuple(keys)
        self.parent = parent
        self.depth = depth

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if not isinstance(index, slice):
            return self._keys[index]
        start, _, step = index.indices(len(self._keys))
        if step != 1:
            return self._keys[index]  # gaps: no chain any more
        parent = self._keys[start - 1] if start else self.parent
        return KeyChain(self._keys[index], parent=parent, depth=self.depth + start)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, KeyChain):
            return self._keys == other._keys
        return isinstance(other, list | tuple) and self._keys == tuple(other)

    def __hash__(self) -> int:
        return hash(self._keys)

    def __repr__(self) -> str:
        return f"KeyChain({len(self._keys)} keys from depth {self.depth})"


def checked_keys(keys: Sequence[bytes | bytearray | memoryview]) -> list[bytes]:
    """The keys as bytes. Raises KeyLengthError naming the first one that is not 32 bytes."""
    if isinstance(keys, KeyChain) or _are_keys(keys):
        return list(keys)
    if isinstance(keys, bytes | bytearray | memoryview | str):
        raise KeyLengthError(
            f"keys is one {type(keys).__name__}", remedy="pass a sequence of keys, also for one key"
        )
    if not isinstance(keys, Iterable):
        raise KeyLengthError(
            f"keys is {keys!r}", remedy="pass a sequence of keys, as ns.keys makes them"
        )
    checked = []
    for index, key in enumerate(keys):
        if type(key) is not bytes:
            key = _as_bytes(index, key)
        if len(key) != KEY_BYTES:
            raise KeyLengthError(
                f"keys[{index}] has {len(key)} bytes",
                remedy=f"a key is the {KEY_BYTES} bytes of a chain hash, as ns.keys makes them",
            )
        checked.append(key)
    return checked


def _are_keys(keys: Sequence[object]) -> TypeGuard[Sequence[bytes]]:
    """Whether all are bytes of the right length, seen in two quick passes."""
    if type(keys) not in (list, tuple) or set(map(type, keys)) != {bytes}:
        return False
    return set(map(len, cast("Sequence[bytes]", keys))) == {KEY_BYTES}


def keys_of_hashes(hashes: Iterable[str | Buffer]) -> list[bytes]:
    """Page hashes as an engine has them, hex text or 32 bytes. Raises KeyLengthError naming the
    index.
    """
    hashes = list(hashes)
    if (made := _of_hex(hashes)) is not None:
        return made
    keys: list[Any] = []
    for index, given in enumerate(hashes):
        if not isinstance(given, str):
            keys.append(given)
            continue
        try:
            keys.append(bytes.fromhex(given))
        except ValueError:
            raise KeyLengthError(
                f"hashes[{index}] is {given[:80]!r}",
                remedy=f"pass {2 * KEY_BYTES} hexadecimal digits, or {KEY_BYTES} bytes",
            ) from None
    return checked_keys(keys)


def _of_hex(hashes: list[Any]) -> list[bytes] | None:
    """The keys where all are hexadecimal text of the right length, as SGLang has them, in a fifth
    of the time; None where something is not.
    """
    if set(map(type, hashes)) != {str} or set(map(len, hashes)) != {2 * KEY_BYTES}:
        return None
    try:
        made = bytes.fromhex("".join(hashes))
    except ValueError:
        return None
    # Blanks are no digits, but no error either.
    return cut(made, KEY_BYTES) if len(made) == KEY_BYTES * len(hashes) else None


def _as_bytes(index: int, key: object) -> bytes:
    try:
        return memoryview(cast("Buffer", key)).tobytes()
    except TypeError:
        raise KeyLengthError(
            f"keys[{index}] is a {type(key).__name__}",
            remedy="pass bytes; ns.keys_from takes hexadecimal text",
        ) from None
