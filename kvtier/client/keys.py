"""Keys of pages, and chains of them that remember what came before.

`chain[n:]` is still a chain: it knows that chain[n - 1] is the parent of its first page and how
deep it begins, so `ns.put(keys[got.prefix:], pages)` tells the daemon where in the conversation
those pages belong.

Immutable: usable from any thread.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast, overload

from kvtier.core.page import KEY_BYTES
from kvtier.core.page_columns import cut
from kvtier.errors import KeyLengthError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["KeyChain", "checked_keys", "joined_keys", "keys_of_hashes", "looked_up"]


class KeyChain(Sequence[bytes]):
    """32-byte keys, each the child of the one before it.

    `parent` is the key before the first one (empty at the head of a conversation), `depth` the
    pages before it. Keys that lie one after the other stay in one piece until somebody asks for
    single ones: a lookup does not.
    """

    __slots__ = ("_joined", "_single", "depth", "parent")

    def __init__(self, keys: Iterable[bytes], *, parent: bytes = b"", depth: int = 0) -> None:
        self._single: tuple[bytes, ...] | None = tuple(keys)
        self._joined: bytes | None = None
        self.parent = parent
        self.depth = depth

    @classmethod
    def of_joined(cls, joined: bytes, *, parent: bytes = b"", depth: int = 0) -> KeyChain:
        """Of keys that lie one after the other, 32 bytes each."""
        made = cls((), parent=parent, depth=depth)
        made._single, made._joined = None, joined
        return made

    @property
    def joined(self) -> bytes:
        """All keys, one after the other."""
        if self._joined is None:
            self._joined = b"".join(self._keys)
        return self._joined

    @property
    def _keys(self) -> tuple[bytes, ...]:
        if self._single is None:
            self._single = tuple(cut(self._joined or b"", KEY_BYTES))
        return self._single

    def __len__(self) -> int:
        if self._single is None:
            return len(self._joined or b"") // KEY_BYTES
        return len(self._single)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if not isinstance(index, slice):
            return self._keys[index]
        start, stop, step = index.indices(len(self))
        if step != 1:
            return self._keys[index]  # gaps: no chain any more
        depth = self.depth + start
        if self._single is not None:
            parent = self._single[start - 1] if start else self.parent
            return KeyChain(self._single[index], parent=parent, depth=depth)
        joined, begin = self._joined or b"", KEY_BYTES * start
        parent = joined[begin - KEY_BYTES : begin] if start else self.parent
        return KeyChain.of_joined(joined[begin : KEY_BYTES * stop], parent=parent, depth=depth)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, KeyChain):
            return self._keys == other._keys
        return isinstance(other, list | tuple) and self._keys == tuple(other)

    def __hash__(self) -> int:
        return hash(self._keys)

    def __repr__(self) -> str:
        return f"KeyChain({len(self)} keys from depth {self.depth})"


def looked_up(keys: Sequence[bytes]) -> Sequence[bytes]:
    """As `checked_keys`; a chain stays as it is."""
    return keys if isinstance(keys, KeyChain) else checked_keys(keys)


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


def joined_keys(keys: Sequence[bytes]) -> bytes:
    """Checked keys one after the other; those of a chain that has them so are not touched."""
    return keys.joined if isinstance(keys, KeyChain) else b"".join(keys)


def keys_of_hashes(hashes: Iterable[str | Buffer]) -> KeyChain:
    """Page hashes as an engine has them, hex text or 32 bytes. Raises KeyLengthError naming the
    index.
    """
    hashes = list(hashes)
    if (joined := _of_hex(hashes)) is not None:
        return KeyChain.of_joined(joined)
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
    return KeyChain(checked_keys(keys))


def _of_hex(hashes: list[Any]) -> bytes | None:
    """The keys, joined, where all are hexadecimal text of the right length, as SGLang has them;
    None where something is not.
    """
    try:
        text = "".join(hashes)
        if set(map(len, hashes)) != {2 * KEY_BYTES}:
            return None
        return unhexlify(text)
    except (TypeError, ValueError):
        return None


def _as_bytes(index: int, key: object) -> bytes:
    try:
        return memoryview(cast("Buffer", key)).tobytes()
    except TypeError:
        raise KeyLengthError(
            f"keys[{index}] is a {type(key).__name__}",
            remedy="pass bytes; ns.keys_from takes hexadecimal text",
        ) from None
