"""Which tokens a page is of, as far as this server has seen.

The daemon knows pages by their hashes alone, and a router places a block by its tokens. The server
hashes tokens whenever it stores a page or looks for one; that is where they come from. Believed is
only what hashes to what it is said to be, along a chain that begins at a prompt's head without a
salt: a block of a request with `cache_salt`, `extra_key` or a LoRA adapter may not be found by
others, so it is told to nobody.

`Blocks` belongs to one thread. `CHAINS` takes chains from any thread and gives them to whoever
listens.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvtier import KvtierError
from kvtier.packing.keys import chain_keys
from kvtier_sglang.events.wire import block_hash

__all__ = ["CHAINS", "Block", "Blocks", "Chain", "Chains"]

#: Tokens (of 8 bytes) and chains that wait for a listener; the oldest of those over it are not told
#: until they are asked for again.
WAITING_TOKENS_MAX: Final = 1 << 22
_WAITING_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Tokens of whole pages, and what the pages are called; `before` is the hash of the page before
    the first, None where nobody said or there is none. Hashes are hexadecimal.
    """

    tokens: Sequence[int]
    hashes: Sequence[str]
    before: str | None


class Block(NamedTuple):
    parent: int | None
    depth: int
    tokens: array[int]


class Blocks:
    """Up to `blocks_max` blocks of `block_tokens` each, the latest seen."""

    def __init__(self, block_tokens: int, *, blocks_max: int) -> None:
        self.block_tokens = block_tokens
        self._blocks_max = blocks_max
        self._known: dict[int, Block] = {}

    def __contains__(self, name: int) -> bool:
        return name in self._known

    def __getitem__(self, name: int) -> Block:
        return self._known[name]

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, chain: Chain) -> set[int]:
        """The blocks that are known now and were not, or the other way round."""
        changed: set[int] = set()
        for name, block in self._proven(chain):
            if self._known.pop(name, None) is None:
                changed.add(name)
            self._known[name] = block
        while len(self._known) > self._blocks_max:
            oldest = next(iter(self._known))
            del self._known[oldest]
            changed ^= {oldest}
        return changed

    def _proven(self, chain: Chain) -> Iterator[tuple[int, Block]]:
        step = self.block_tokens
        try:
            before = None if chain.before is None else bytes.fromhex(chain.before)
        except ValueError:  # no page has such a name
            return
        parent = None if before is None else block_hash(before)
        if parent is not None and parent not in self._known:
            return
        depth = 0 if parent is None else self._known[parent].depth + 1
        try:
            keys = chain_keys(chain.tokens, step, parent=before)
        except KvtierError:  # pairs of tokens, as EAGLE has them
            return
        for number, (key, said) in enumerate(zip(keys, chain.hashes, strict=False)):
            if key.hex() != said.lower():
                return
            tokens = array("q", chain.tokens[number * step : (number + 1) * step])
            name = block_hash(key)
            yield name, Block(parent=parent, depth=depth + number, tokens=tokens)
            parent = name


class Inbox:
    """Chains that wait for one listener, in order. Any thread."""

    def __init__(self) -> None:
        self._chains: deque[Chain] = deque()
        self._tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._chains)

    def put(self, chain: Chain) -> None:
        with self._lock:
            self._chains.append(chain)
            self._tokens += len(chain.tokens)
            while self._chains and (
                self._tokens > WAITING_TOKENS_MAX or len(self._chains) > _WAITING_MAX
            ):
                self._tokens -= len(self._chains.popleft().tokens)

    def take(self) -> Chain | None:
        """The oldest, None where there is none."""
        with self._lock:
            if not self._chains:
                return None
            chain = self._chains.popleft()
            self._tokens -= len(chain.tokens)
            return chain


class Chains:
    """Of one process: the plugin's hooks give, publishers take."""

    def __init__(self) -> None:
        self._listeners: list[Inbox] = []

    @property
    def has_listeners(self) -> bool:
        return bool(self._listeners)

    def listen(self) -> Inbox:
        """What is told from now on. End it with `leave`."""
        made = Inbox()
        self._listeners = [*self._listeners, made]
        return made

    def leave(self, listener: Inbox) -> None:
        self._listeners = [other for other in self._listeners if other is not listener]

    def tell(self, tokens: Any, hashes: Sequence[str] | None, before: str | None) -> None:
        """`tokens` are copied if somebody listens: SGLang may change what it passed. Pairs of
        tokens, as EAGLE has them, are told to nobody.
        """
        if not self._listeners or not hashes:
            return
        try:
            copied = array("q", tokens)
        except (TypeError, OverflowError):
            return
        chain = Chain(tokens=copied, hashes=tuple(hashes), before=before)
        for listener in self._listeners:
            listener.put(chain)


#: Of this process.
CHAINS: Final = Chains()
