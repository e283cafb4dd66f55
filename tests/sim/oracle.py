"""What may be found, and what must be: known from what clients were told, by rules of its own.

    live     the version that a get in this boot may give
    kept     versions that may be found after a restart: not deleted for sure
    must     pages acknowledged as durable: on NVMe until something known takes them away
    sealed   after SIGKILL every page that was findable on NVMe must be there, after a power cut
             every one that a sync has covered

A fault that was injected (a bit flipped in memory, a page hurt on the device) excuses exactly the
page that it hit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.core.page import GetCode, Tier
from kvtier.testing.cells import check_page
from kvtier.transfer.place import Place

__all__ = ["Broken", "Counts", "Oracle", "Space", "Window", "WrongByte"]

#: After these a page can still be there.
_MAYBE = frozenset((GetCode.BUSY, GetCode.TIMEOUT, GetCode.IO_ERROR))


class Broken(AssertionError):
    """A promise of kvtier is broken; the message names the seed."""


class WrongByte(Broken):
    """Somebody was given, as a hit, a page that is not the one it asked for."""


@dataclass(slots=True)
class Counts:
    """What a run has done and seen; runs add up."""

    stored: int = 0
    stored_local: int = 0  # of them, by clients that wrote into the arena themselves
    hits_host: int = 0
    hits_nvme: int = 0
    flips: int = 0  # bits in memory
    corrupt: int = 0  # pages that a get found to be damaged
    demoted: int = 0
    promoted: int = 0
    durable: int = 0  # pages acknowledged as such
    evicted_nvme: int = 0
    deleted: int = 0
    bumped: int = 0
    checkpoints: int = 0
    timeouts: int = 0
    offline: int = 0
    injected: int = 0  # faults of the devices
    refused: int = 0  # writes of the journal, a checkpoint or the registry
    kills: int = 0
    power_cuts: int = 0
    stops: int = 0
    recovered: int = 0  # pages that a restart has found
    demanded: int = 0  # of them those that had to be found
    ghosts: int = 0  # pages found that were damaged or had given way before
    lost: int = 0  # restarts without a checkpoint that could be used
    without: int = 0  # boots without a device
    back: int = 0  # pages that came back with their device, as they had to

    def add(self, other: Counts) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, name)} {name}" for name in self.__slots__)


@dataclass(slots=True, eq=False)
class Space:
    """One shard of one family in one generation, over all boots. `place` is that of this boot."""

    name: str  # of the family
    place: Place
    size: int
    is_ended: bool = False  # for sure
    is_ending: bool = False  # perhaps
    live: dict[bytes, int] = field(default_factory=dict)
    kept: dict[bytes, set[int]] = field(default_factory=dict)
    must: dict[bytes, int] = field(default_factory=dict)
    #: (generation, device) of pages whose device is away, and which come back with it.
    waiting: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    #: Pages that have ever waited: there can be copies of two versions, and the newest one counts.
    several: set[bytes] = field(default_factory=set)
    log: list[tuple[bytes, int]] = field(default_factory=list)  # everything stored in this boot
    flips: Counter[bytes] = field(default_factory=Counter)  # bits flipped in memory
    hurt: set[bytes] = field(default_factory=set)  # pages damaged on the device
    hurts: Counter[bytes] = field(default_factory=Counter)  # how often, also if stored anew since
    disturbed: Counter[bytes] = field(default_factory=Counter)  # deletes and withdrawals

    @property
    def title(self) -> str:
        """What its pages say of whose they are."""
        return f"{self.name}/{self.place.shard}/{self.place.generation}"

    def page(self, key: bytes) -> str:
        """A page, for a message."""
        return f"{key.hex()[:8]} of {self.title}"


@dataclass(slots=True)
class Window:
    """What could be found when a get took its leases."""

    live: dict[bytes, int]
    was_there: dict[bytes, bool]
    logged: int
    flips: dict[bytes, int]
    must: dict[bytes, int]
    hurt: set[bytes]
    hurts: dict[bytes, int]
    disturbed: dict[bytes, int]


class Oracle:
    """All spaces of a world, and the judgements. `seed` is in every message."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts = Counts()
        self.every: list[Space] = []
        #: Generations of copies on NVMe that a sync has covered.
        self.safe: set[int] = set()

    def broken(self, what: str) -> Broken:
        return Broken(f"seed {self.seed}: {what}")

    def wrong(self, what: str) -> WrongByte:
        return WrongByte(f"seed {self.seed}: {what}")

    def space(self, name: str, place: Place, size: int) -> Space:
        """What is known of a place, also from earlier boots."""
        for known in self.every:
            if known.place == place:
                return known
        self.every.append(Space(name, place, size))
        return self.every[-1]

    def space_of(self, namespace: int, shard: int) -> Space:
        """That of a number in this boot."""
        for space in reversed(self.every):
            if (space.place.namespace, space.place.shard) == (namespace, shard):
                return space
        raise self.broken(f"nobody has opened namespace {namespace}, shard {shard}")

    # -- what happens to pages -------------------------------------------------------------------

    def stored(self, space: Space, key: bytes, version: int) -> None:
        if key in space.must and key not in space.hurt:
            raise self.broken(f"{space.page(key)} was durable, and a put finds nothing there")
        space.must.pop(key, None)
        space.waiting.pop(key, None)
        space.hurt.discard(key)
        space.live[key] = version
        space.kept.setdefault(key, set()).add(version)
        space.log.append((key, version))
        self.counts.stored += 1

    def durable(self, space: Space, key: bytes) -> None:
        """Somebody was told that it is on NVMe."""
        version = space.live.get(key)
        if version is None and key in space.hurt:
            return  # what a restart has found in its place is damaged, and nobody has seen it yet
        if version is None:
            raise self.broken(f"{space.page(key)} is durable, and should not even be there")
        self.counts.durable += 1
        if not (space.is_ended or space.is_ending or key in space.hurt):
            space.must[key] = version

    def deleting(self, space: Space, keys: Iterable[bytes]) -> dict[bytes, set[int]]:
        """The store has them no more; the versions that must not come back when this is
        answered."""
        doomed = {}
        for key in keys:
            space.live.pop(key, None)
            space.must.pop(key, None)
            space.waiting.pop(key, None)
            space.disturbed[key] += 1
            doomed[key] = set(space.kept.get(key, ()))
        return doomed

    def deleted(self, space: Space, doomed: dict[bytes, set[int]]) -> None:
        """It was answered."""
        for key, versions in doomed.items():
            space.kept.get(key, set()).difference_update(versions)
        self.counts.deleted += len(doomed)

    def ending(self, spaces: Iterable[Space]) -> None:
        """A bump is under way."""
        for space in spaces:
            space.is_ending = True
            space.must.clear()

    def not_ended(self, spaces: Iterable[Space]) -> None:
        """The bump was refused, and they are as they were."""
        for space in spaces:
            space.is_ending = False

    def ended(self, spaces: Iterable[Space]) -> None:
        """A bump was answered: nothing of these is found again, ever."""
        for space in spaces:
            space.is_ended = True
            space.live.clear()
            space.kept.clear()
            space.must.clear()
        self.counts.bumped += 1

    def evicted(self, tier: Tier, namespace: int, shard: int, key: bytes) -> None:
        if tier is Tier.NVME:
            self.counts.evicted_nvme += 1
            self.space_of(namespace, shard).must.pop(key, None)

    def hurt(self, name: tuple[int, int, bytes]) -> None:
        namespace, shard, key = name
        space = self.space_of(namespace, shard)
        space.hurt.add(key)
        space.hurts[key] += 1
        space.must.pop(key, None)
        space.waiting.pop(key, None)

    # -- gets ------------------------------------------------------------------------------------

    def window(self, space: Space, keys: list[bytes], was_there: list[bool]) -> Window:
        return Window(
            live={key: space.live[key] for key in keys if key in space.live},
            was_there=dict(zip(keys, was_there, strict=True)),
            logged=len(space.log),
            flips={key: space.flips[key] for key in keys},
            must={key: space.must[key] for key in keys if key in space.must},
            hurt={key for key in keys if key in space.hurt},
            hurts={key: space.hurts[key] for key in keys},
            disturbed={key: space.disturbed[key] for key in keys},
        )

    def judge_hit(
        self, space: Space, key: bytes, copy: bytearray, window: Window, tier: Tier
    ) -> None:
        """The version that was there when the get took its leases, or one stored since."""
        versions = {version for at, version in space.log[window.logged :] if at == key}
        versions |= {found.get(key, -1) for found in (window.live, space.live)} - {-1}
        if not versions:
            raise self.wrong(f"{space.page(key)}: nobody put it, or it was deleted")
        if not any(self._is(space, key, copy, version) for version in versions):
            raise self.wrong(f"{space.page(key)} holds foreign or torn cells")
        if tier is Tier.NVME:
            self.counts.hits_nvme += 1
        else:
            self.counts.hits_host += 1

    def judge_damage(self, space: Space, key: bytes, window: Window) -> None:
        """A client has found that what it was given is not what the maker summed up."""
        if space.flips[key] == window.flips[key]:
            raise self.broken(f"{space.page(key)}: a sum failed without damage")

    def judge_miss(self, space: Space, key: bytes, code: GetCode, window: Window) -> None:
        name = f"{space.page(key)}: {code.name}"
        is_calm = space.disturbed[key] == window.disturbed[key] and not space.is_ending
        is_calm &= all(at != key for at, _ in space.log[window.logged :])
        # Also of one that was hurt while the get ran, and stored anew before it ended.
        is_hurt = key in space.hurt or key in window.hurt or space.hurts[key] > window.hurts[key]
        if code is GetCode.CORRUPT:
            self.counts.corrupt += 1
            if not (is_hurt or space.flips[key]):
                raise self.broken(f"{name} without damage")
        if code is GetCode.MISS and window.was_there[key] and is_calm and not is_hurt:
            raise self.broken(f"{name}: missed what was there")
        # The same all the while: one that was deleted and put again was away in between.
        was_there = key in window.must and window.must[key] == space.must.get(key)
        if code not in _MAYBE and was_there:
            raise self.broken(f"{name} of a page on NVMe that is whole")

    def _is(self, space: Space, key: bytes, copy: bytes | bytearray, version: int) -> bool:
        return not check_page(copy, namespace=space.title, key=key, version=version)

    # -- restarts --------------------------------------------------------------------------------

    def version_of(self, space: Space, key: bytes, payload: bytes) -> int:
        """Which of the versions that may be there a page found after a restart is."""
        for version in sorted(space.kept.get(key, ())):
            if self._is(space, key, payload, version):
                return version
        raise self.wrong(f"{space.page(key)}: it was deleted or nobody put it, and came back")

    def judge_restart(
        self,
        found: dict[tuple[Space, bytes], int],
        demanded: dict[tuple[Space, bytes], int],
        back: Iterable[tuple[Space, bytes]],
    ) -> None:
        """`found` is the version of each page that a restart has found whole, `demanded` what
        must be there, `back` what must be in any version, as its device is there again."""
        for space, key in back:
            if (space, key) not in found:
                raise self.broken(f"{space.page(key)} did not come back with its device")
            self.counts.back += 1
        for (space, key), version in demanded.items():
            if key in space.hurt or space.is_ended:
                continue
            if (space, key) not in found:
                raise self.broken(f"{space.page(key)} was durable and did not come back")
            if found[space, key] != version and key not in space.several:
                raise self.broken(f"{space.page(key)} came back as an older version")
            self.counts.demanded += 1
        self.counts.recovered += len(found)
        for space in self.every:
            space.live = {}
            space.must = {}
            space.log.clear()
            space.flips.clear()
        for (space, key), version in found.items():
            space.live[key] = space.must[key] = version
            space.hurt.discard(key)
