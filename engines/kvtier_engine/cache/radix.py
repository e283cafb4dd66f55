"""Which prefixes lie on the device: a radix tree whose unit is one full page of tokens.

Rules. A node is a run of pages, each named by the tokens in it; a path from the root is a prefix.
`match` changes nothing at all. Only `insert` splits a node. A Lock keeps the path that it was made
for from being evicted; nodes are evicted from the tail of leaves, the longest unused first. The
tree knows page numbers, and the tag that each had when it was inserted, and no pool: whoever calls
takes a reference for each page that `insert` took, and gives back those that `evict` and `prune`
return. A page that is somebody else's by now (`are_ours` compares tags) is never returned: it is
dropped with all that follows it, and counted.

One thread.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtier_engine.errors import EngineInconsistent

__all__ = ["Lock", "Match", "RadixCache"]

PageOfTokens = tuple[int, ...]
#: Of pages and the tags that they had: is each the same allocation still?
AreOurs = Callable[[Sequence[int], Sequence[int]], Sequence[bool]]


@dataclass(slots=True, eq=False)
class _Node:
    """`runs[i]` are the tokens of `pages[i]`, `tags[i]` its tag. The root has none. `locks` counts
    Locks at or below.
    """

    runs: list[PageOfTokens]
    pages: list[int]
    tags: list[int]
    parent: _Node | None
    children: dict[PageOfTokens, _Node] = field(default_factory=dict)
    locks: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The pages of the longest prefix that is there, and the last node that is whole within it.
    Good until the next `insert` or `evict`.
    """

    pages: tuple[int, ...]
    node: _Node


class Lock:
    """Keeps a path; made by `RadixCache.lock`. Released once, by `release`."""

    __slots__ = ("_cache", "_node")

    def __init__(self, cache: RadixCache, node: _Node) -> None:
        self._cache = cache
        self._node: _Node | None = node

    def release(self) -> None:
        """Lets the path be evicted. A second call does nothing."""
        if self._node is not None:
            self._cache._unlock(self._node)
            self._node = None


class RadixCache:
    """At first empty. `page_tokens` tokens name a page. `stale_pages` counts those that were found
    to be somebody else's.
    """

    def __init__(self, page_tokens: int, are_ours: AreOurs) -> None:
        self._page_tokens = page_tokens
        self._are_ours = are_ours
        self._root = _Node([], [], [], None)
        self._pages = 0
        self.stale_pages = 0
        self._clock = itertools.count(1)
        #: (used, tie, node) of nodes that were unlocked leaves; stale ones are skipped.
        self._leaves: list[tuple[int, int, _Node]] = []
        self._ties = itertools.count()

    @property
    def pages(self) -> int:
        """How many pages the tree names."""
        return self._pages

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest prefix of whole pages of `tokens`. Changes nothing; `prune` comes first, so
        that no page of it is somebody else's.
        """
        node, pages = self._root, []
        wanted = self._split(tokens)
        at = 0
        while at < len(wanted) and (child := node.children.get(wanted[at])) is not None:
            same = _common(child.runs, wanted[at:])
            pages += child.pages[:same]
            if same < len(child.runs):
                break
            node, at = child, at + same
        return Match(pages=tuple(pages), node=node)

    def lock(self, match: Match) -> Lock:
        """Keeps the whole nodes of what `match` found, and counts them as used now. Of a node that
        it ends within nothing is kept.
        """
        now = next(self._clock)
        for node in _upwards(match.node):
            node.locks += 1
            node.used = now
        return Lock(self, match.node)

    def prune(self, tokens: Sequence[int]) -> list[int]:
        """Drops, on the path of `tokens`, the first page that is somebody else's and all that
        follows it, locked or not. Returns those among the dropped that are ours, to be given back.
        """
        for node, _ in self._path(tokens):
            sound = list(self._are_ours(node.pages, node.tags))
            if not all(sound):
                return self._cut(node, sound.index(False))
        return []

    def drop(self, tokens: Sequence[int], first: int) -> list[int]:
        """Drops the path of `tokens` from its page `first` on, and all that follows it, locked or
        not. Returns the pages to be given back.
        """
        for node, start in self._path(tokens):
            if start + len(node.pages) > first:
                return self._cut(node, max(0, first - start))
        return []

    def insert(self, tokens: Sequence[int], pages: Sequence[int], tags: Sequence[int]) -> list[int]:
        """Adds the prefix `tokens` (whole pages) that lies in `pages`; the pages that it took.

        Where a page of these tokens is there already it stays, and the one given is not taken.
        """
        wanted = self._split(tokens)
        whole = len(pages) * self._page_tokens
        if not len(wanted) == len(pages) == len(tags) or len(tokens) != whole:
            raise EngineInconsistent(
                f"{len(tokens)} tokens for {len(pages)} pages", remedy="report this: a defect"
            )
        node, at, now = self._root, 0, next(self._clock)
        while at < len(wanted) and (child := node.children.get(wanted[at])) is not None:
            same = _common(child.runs, wanted[at:])
            node, at = self._head_of(child, same), at + same
            node.used = now
        if at == len(wanted):
            self._offer(node)
            return []
        leaf = _Node(wanted[at:], list(pages[at:]), list(tags[at:]), node, used=now)
        node.children[wanted[at]] = leaf
        self._pages += len(leaf.pages)
        self._offer(leaf)
        return list(leaf.pages)

    def evict(self, count: int) -> list[int]:
        """Up to `count` pages that are not locked, the longest unused leaves' tails first. Fewer
        are returned when the rest is locked; `evict(0)` is always safe.
        """
        gone: list[int] = []
        while len(gone) < count and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            if node.used != used or node.locks or node.children or parent is None:
                continue
            if not node.pages:
                continue  # evicted already, under an entry of its own
            kept = max(0, len(node.pages) - (count - len(gone)))
            gone += reversed(self._cut(node, kept))
        return gone

    def unlocked(self) -> Iterator[int]:
        """The pages that no Lock keeps, in no order."""
        for node in self._walk():
            if not node.locks:
                yield from node.pages

    def check(self) -> tuple[int, ...]:
        """Walks the whole tree; its pages. Raises EngineInconsistent naming what is wrong."""
        pages: list[int] = []
        for node in self._walk():
            pages += node.pages
            below = sum(child.locks for child in node.children.values())
            problems = {
                "an empty node": node.parent is not None and not node.pages,
                "pages without tokens": len(node.pages) != len(node.runs),
                "pages without tags": len(node.pages) != len(node.tags),
                "a page of the wrong length": any(len(r) != self._page_tokens for r in node.runs),
                "fewer locks than below": node.locks < below,
                "a child under another's name": any(
                    child.runs[:1] != [name] or child.parent is not node
                    for name, child in node.children.items()
                ),
            }
            for problem in (name for name, found in problems.items() if found):
                raise EngineInconsistent(f"radix tree: {problem}", remedy="report this: a defect")
        if len(set(pages)) != len(pages) or len(pages) != self._pages:
            raise EngineInconsistent(
                f"radix tree: {len(pages)} pages, {len(set(pages))} different, {self._pages} known",
                remedy="report this: a defect",
            )
        return tuple(pages)

    @property
    def locks(self) -> int:
        """How many Locks are held now."""
        return self._root.locks

    def _path(self, tokens: Sequence[int]) -> Iterator[tuple[_Node, int]]:
        """The nodes that `tokens` go through, the last perhaps in part: (node, its first page)."""
        node, at, wanted = self._root, 0, self._split(tokens)
        while at < len(wanted) and (child := node.children.get(wanted[at])) is not None:
            same = _common(child.runs, wanted[at:])
            yield child, at
            if same < len(child.runs):
                return
            node, at = child, at + same

    def _cut(self, node: _Node, kept: int) -> list[int]:
        """Takes all but the first `kept` pages of a node away, and everything below it. Those that
        are ours, in order.

        A node that goes keeps its parent: a Lock on it counts there until it is released.
        """
        parent = node.parent
        assert parent is not None
        if not kept:
            del parent.children[node.runs[0]]
        ours: list[int] = []
        left = [(node, kept)]
        while left:
            one, start = left.pop()
            sound = self._are_ours(one.pages[start:], one.tags[start:])
            ours += itertools.compress(one.pages[start:], sound)
            self.stale_pages += len(sound) - sum(sound)
            self._pages -= len(sound)
            del one.pages[start:], one.runs[start:], one.tags[start:]
            left += [(child, 0) for child in one.children.values()]
            one.children.clear()
        self._offer(node if kept else parent)
        return ours

    def _split(self, tokens: Sequence[int]) -> list[PageOfTokens]:
        size = self._page_tokens
        ends = range(size, len(tokens) + 1, size)
        return [tuple(tokens[end - size : end]) for end in ends]

    def _head_of(self, node: _Node, count: int) -> _Node:
        """The node of the first `count` pages of `node`, which becomes the rest if it has more.

        It is the head that is new: Locks name the tail, whose path still leads through the head.
        """
        if count == len(node.runs):
            return node
        assert node.parent is not None
        head = _Node(node.runs[:count], node.pages[:count], node.tags[:count], node.parent)
        head.locks, head.used = node.locks, node.used
        node.parent.children[head.runs[0]] = head
        del node.runs[:count], node.pages[:count], node.tags[:count]
        node.parent = head
        head.children[node.runs[0]] = node
        return head

    def _unlock(self, node: _Node) -> None:
        for above in _upwards(node):
            above.locks -= 1
            self._offer(above)  # the one below may have been dropped under its lock

    def _offer(self, node: _Node) -> None:
        """Notes a node that may be evicted now."""
        if node.parent is None or node.locks or node.children or not node.pages:
            return
        heapq.heappush(self._leaves, (node.used, next(self._ties), node))
        if len(self._leaves) > 64 + 4 * max(1, self._pages):
            self._forget_stale()

    def _forget_stale(self) -> None:
        """One entry a node, so that the heap stays as small as the tree."""
        fresh = {id(n): (u, t, n) for u, t, n in self._leaves if n.used == u and n.pages}
        self._leaves = list(fresh.values())
        heapq.heapify(self._leaves)

    def _walk(self) -> Iterator[_Node]:
        left = [self._root]
        while left:
            node = left.pop()
            left += node.children.values()
            yield node


def _common(runs: list[PageOfTokens], wanted: list[PageOfTokens]) -> int:
    same = 0
    for ours, theirs in zip(runs, wanted, strict=False):
        if ours != theirs:
            break
        same += 1
    return same


def _upwards(node: _Node) -> Iterator[_Node]:
    at: _Node | None = node
    while at is not None:
        yield at
        at = at.parent
