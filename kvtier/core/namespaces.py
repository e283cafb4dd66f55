"""Families and their generations.

A namespace number stands for one family in one namespace generation, and is what the index
compares. A bump gives the family a new number: every page under an older number is a miss from that
moment on, without touching one of them. Numbers are never used again. `to_state` is what must be
durable before a bump or delete is answered. The caller holds a lock of its own (one thread calls).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.errors import GenerationConflict, LimitExceeded, NamespaceMismatch, UnknownNamespace

__all__ = ["Family", "FamilyIdentity", "Namespaces", "ShardIdentity"]

_TOKENS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyIdentity:
    """What a client declares about a family; `fingerprint` covers all of it and more."""

    fingerprint: bytes
    tenant: str
    model_id: str
    weights_revision: str
    shard_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIdentity:
    """What one shard of a family declares: two openers of a shard must agree."""

    index: int
    layers: tuple[int, int]
    heads: tuple[int, int]


@dataclass(slots=True)
class Family:
    identity: FamilyIdentity
    number: int
    generation: int
    weights_revision: str
    shards: dict[int, ShardIdentity] = field(default_factory=dict)
    tokens: dict[bytes, int] = field(default_factory=dict)  # bump token -> generation it gave


class Namespaces:
    def __init__(self, *, namespaces_max: int) -> None:
        self._families: dict[bytes, Family] = {}
        self._by_number: dict[int, Family] = {}
        self._last_number = 0
        # New families start above every deleted one, so that a family deleted and made again never
        # meets its old generation (and with it old pages) again.
        self._generation_floor = 0
        self._namespaces_max = namespaces_max

    def __len__(self) -> int:
        return len(self._families)

    def families(self) -> list[Family]:
        return list(self._families.values())

    @property
    def generation_floor(self) -> int:
        """The highest generation of those that were deleted, 0 for none."""
        return self._generation_floor

    @property
    def last_number(self) -> int:
        """Of a namespace, given last; it rises whenever a family is made, bumped or deleted."""
        return self._last_number

    def is_new(self, fingerprint: bytes) -> bool:
        return fingerprint not in self._families

    def open(self, identity: FamilyIdentity, shard: ShardIdentity) -> Family:
        """The family, made if it is new. Raises NamespaceMismatch naming the field that differs."""
        family = self._families.get(identity.fingerprint)
        if family is None:
            family = self._make(identity)
        if family.weights_revision != identity.weights_revision:
            raise NamespaceMismatch(
                f"weights_revision: the namespace now has {family.weights_revision!r},"
                f" the opener has {identity.weights_revision!r}",
                remedy="load the weights that the namespace was bumped to, or bump it to yours",
            )
        known = family.shards.setdefault(shard.index, shard)
        if known != shard:
            name = "layers" if known.layers != shard.layers else "heads"
            raise NamespaceMismatch(
                f"shard {shard.index} {name}: the namespace has {getattr(known, name)},"
                f" the opener has {getattr(shard, name)}",
                remedy="open every shard of a family with the same parallel layout",
            )
        return family

    def current(self, number: int) -> Family | None:
        """The family whose present number this is; None for an older number or a deleted family."""
        return self._by_number.get(number)

    def get(self, fingerprint: bytes) -> Family:
        try:
            return self._families[fingerprint]
        except KeyError:
            raise UnknownNamespace(
                f"no namespace with fingerprint {fingerprint.hex()}",
                remedy="list them with `kvtier status`, or open it first",
            ) from None

    def bump(
        self, fingerprint: bytes, *, expected: int, weights_revision: str, token: bytes
    ) -> tuple[Family, int | None]:
        """Compare-and-set; (family, number that ended), or (family, None) when `token` was used
        before."""
        family = self.get(fingerprint)
        if token and token in family.tokens:
            return family, None
        if family.generation != expected:
            raise GenerationConflict(
                f"the namespace is at generation {family.generation}, not {expected}",
                remedy="take the present generation from `kvtier status` or a new handle",
            )
        ended = family.number
        family.generation += 1
        family.weights_revision = weights_revision or family.weights_revision
        if token:
            family.tokens[token] = family.generation
            while len(family.tokens) > _TOKENS_MAX:
                del family.tokens[next(iter(family.tokens))]
        self._renumber(family)
        return family, ended

    def delete(self, fingerprint: bytes) -> int:
        """Forgets the family; the number that ended."""
        family = self.get(fingerprint)
        del self._families[fingerprint]
        del self._by_number[family.number]
        self._generation_floor = max(self._generation_floor, family.generation)
        self._last_number += 1  # given to none: so that a state of before can be told from this one
        return family.number

    def to_state(self) -> dict[str, object]:
        """Plain values for the namespace journal."""
        return {
            "last_number": self._last_number,
            "generation_floor": self._generation_floor,
            "families": [
                {
                    "fingerprint": f.identity.fingerprint,
                    "tenant": f.identity.tenant,
                    "model_id": f.identity.model_id,
                    "opened_revision": f.identity.weights_revision,
                    "shard_count": f.identity.shard_count,
                    "number": f.number,
                    "generation": f.generation,
                    "weights_revision": f.weights_revision,
                    "shards": [[s.index, *s.layers, *s.heads] for s in f.shards.values()],
                    "tokens": [[token, gen] for token, gen in f.tokens.items()],
                }
                for f in self._families.values()
            ],
        }

    def load_state(self, state: dict[str, object]) -> None:
        """Takes over what `to_state` gave. Raises KeyError, TypeError or ValueError on anything
        else."""
        families = state["families"]
        last_number, floor = state["last_number"], state["generation_floor"]
        if not (
            isinstance(families, list) and isinstance(last_number, int) and isinstance(floor, int)
        ):
            raise TypeError("a namespace journal holds a list of families and two numbers")
        for entry in families:
            identity = FamilyIdentity(
                fingerprint=bytes(entry["fingerprint"]),
                tenant=str(entry["tenant"]),
                model_id=str(entry["model_id"]),
                weights_revision=str(entry["opened_revision"]),
                shard_count=int(entry["shard_count"]),
            )
            family = Family(
                identity,
                int(entry["number"]),
                int(entry["generation"]),
                str(entry["weights_revision"]),
            )
            for index, layer_start, layer_end, head_start, head_end in entry["shards"]:
                family.shards[index] = ShardIdentity(
                    index=index, layers=(layer_start, layer_end), heads=(head_start, head_end)
                )
            family.tokens = {bytes(token): int(generation) for token, generation in entry["tokens"]}
            self._families[identity.fingerprint] = family
            self._by_number[family.number] = family
        self._last_number, self._generation_floor = last_number, floor

    def _make(self, identity: FamilyIdentity) -> Family:
        if len(self._families) >= self._namespaces_max:
            raise LimitExceeded(
                f"{len(self._families)} namespaces are open, the limit is {self._namespaces_max}",
                remedy="delete namespaces that are not used, or raise limits.namespaces_max",
            )
        family = Family(identity, 0, self._generation_floor + 1, identity.weights_revision)
        self._families[identity.fingerprint] = family
        self._renumber(family)
        return family

    def _renumber(self, family: Family) -> None:
        self._by_number.pop(family.number, None)
        self._last_number += 1
        family.number = self._last_number
        self._by_number[family.number] = family
