"""What the policy that learns keeps from boot to boot, and a start that cannot have it."""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvtier.config import HostPolicyName
from kvtier.core.page import Tier
from kvtier.core.policy.lru import Clock
from kvtier.core.store import Store
from kvtier.core.table import CopyTable
from kvtier.daemon.forecasts import ForecastFile, host_policy, pack_learned, unpack_learned
from kvtier.errors import MissingExtra
from kvtier.tiers.sealed_file import write_sealed
from tests.core.gittins_support import layout, policy
from tests.core.support import NS, keys, make_store, put

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
GITTINS = HostPolicyName.GITTINS
GOLDEN = Path(__file__).parent.parent / "golden" / "forecasts_v1.hex"
SMALL = {(Tier.HOST, 69_632): b"\x01\x02\x03", (Tier.HOST, 1 << 40): b"", (Tier.NVME, 8192): b"x"}


def filled(seed: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> ForecastFile:
    """The file of a store whose policy has learned something."""
    monkeypatch.setattr("tests.core.support.Store", partial(Store, make_policy=policy.Gittins))
    store = make_store(slots=24, slab_slots=4)
    file = ForecastFile(directory, store, GITTINS)
    for n in range(40):
        store.forecasts.tell_time(1.0 + 5 * n)
        for key in range(100 * (n * seed % 7), 100 * (n * seed % 7) + 4):
            put(store, key, key - 1 if key % 100 else None)
        for read in store.acquire(NS, 0, keys([100 * (n * seed % 7)])):
            getattr(read, "release", int)()
    return file


def test_golden_bytes() -> None:
    assert pack_learned(SMALL).hex() == GOLDEN.read_text().strip()
    assert unpack_learned(bytes.fromhex(GOLDEN.read_text())) == SMALL


def test_golden_bytes_of_a_model() -> None:
    made = policy.Gittins(CopyTable(1), Clock())
    state = made.forecast.arrays
    state.fine[:] = np.arange(state.fine.size).reshape(state.fine.shape)
    state.coarse[:] = np.arange(state.coarse.size).reshape(state.coarse.shape)
    state.level[:] = [4.0, 1.5, -2.5, 3.5]
    state.counts[layout.IS_LRU] = 1
    learned = made.learned()
    assert len(learned) == 81_568 == policy.LEARNED_BYTES
    assert learned[:8].hex() == "000000000000803f"
    assert learned[-32:].hex() == (
        "000000000000f83f00000000000004c00000000000000c400100000000000000"
    )
    assert hashlib.sha256(learned).hexdigest()[:16] == "6c7452cba64aa268"


@pytest.mark.parametrize("cut", [0, 3, 8, 12, 20, -1])
def test_what_is_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match=r"it cannot be read|bytes where"):
        unpack_learned(pack_learned(SMALL)[:cut])


def test_what_was_learned_is_there_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = filled(1, tmp_path, monkeypatch)
    asyncio.run(first.save())
    learned = first._store.forecasts.take()
    assert learned
    store = make_store(slots=24, slab_slots=4)
    again = ForecastFile(tmp_path, store, GITTINS)
    assert again.load() == ""
    assert store.forecasts.take() == learned, "kept before any page of its class has come"
    put(store, 1, None)
    ((_, model),) = store.forecasts.take().items()
    assert model[: -4 * 8] == next(iter(learned.values()))[: -4 * 8], "its queue has it now"
    assert model[: -4 * 8] != policy.Gittins(CopyTable(1), Clock()).learned()[: -4 * 8]


def _other_version(path: Path) -> None:
    write_sealed(path, b"forecast", (2).to_bytes(4, "little") + bytes(4))


def _damaged(path: Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[len(blob) // 2] ^= 1
    path.write_bytes(blob)


def _not_learned(path: Path) -> None:
    write_sealed(path, b"forecast", pack_learned(SMALL))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_other_version, "version 2, this daemon knows version 1"),
        (_damaged, "its checksum does not match"),
        (_not_learned, "3 bytes where 81568 belong"),
        (lambda path: path.write_bytes(b"no"), "too short for its header"),
    ],
    ids=["version", "damaged", "strange", "short"],
)
def test_a_file_that_cannot_be_used_is_named_and_stops_nothing(
    harm: object, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = filled(2, tmp_path, monkeypatch)
    asyncio.run(first.save())
    assert callable(harm)
    harm(tmp_path / "forecasts")
    store = make_store(slots=24, slab_slots=4)
    again = ForecastFile(tmp_path, store, GITTINS)
    assert reason in again.load()
    assert store.forecasts.take() == {}
    put(store, 1, None)
    asyncio.run(again.save())
    assert ForecastFile(tmp_path, store, GITTINS).load() == "", "a whole one takes its place"


def test_other_policies_write_and_read_nothing(tmp_path: Path) -> None:
    (tmp_path / "forecasts").write_bytes(b"no")
    file = ForecastFile(tmp_path, make_store(slots=4, slab_slots=4), HostPolicyName.LRU)
    assert (file.load(), file.is_on) == ("", False)
    asyncio.run(file.save())
    assert (tmp_path / "forecasts").read_bytes() == b"no"


def test_without_numba_the_policy_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError("there is none")

    monkeypatch.setattr("kvtier.daemon.forecasts.load_optional", absent)
    with pytest.raises(MissingExtra, match=r'host.policy = "gittins" needs numba') as caught:
        host_policy(GITTINS)
    assert "kvtier[fast]" in caught.value.remedy
    assert host_policy(HostPolicyName.ARC).__name__ == "Arc"


def test_a_queue_without_pages_keeps_what_it_has_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(1, tmp_path, monkeypatch)._store
    store.delete(NS, 0, keys(range(700)))
    put(store, 5000, None)
    (model,) = store.forecasts.take().values()
    assert model[: -4 * 8] != policy.Gittins(CopyTable(1), Clock()).learned()[: -4 * 8]
