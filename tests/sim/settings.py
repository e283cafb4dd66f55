"""What a seed has to do with: tiers with much or little room, devices that fail or do not, how
often boots end; and, in a crowd, few pages that everybody wants at once."""

from __future__ import annotations

import random
from dataclasses import replace

from kvtier.config.storage import WritePolicy
from kvtier.testing.faulty_tier import Fault, FaultKind
from kvtier.tiers.base import TierOperation
from tests.sim.boot import Setting
from tests.sim.sim_nvme import Chances

__all__ = ["crowded", "draw_setting"]

READ, WRITE, SYNC = TierOperation.READ, TierOperation.WRITE, TierOperation.SYNC
#: (kind, operation, probability a call)
_FAULTS = (
    (FaultKind.EIO, WRITE, 0.01),
    (FaultKind.SHORT, WRITE, 0.01),
    (FaultKind.TORN, WRITE, 0.02),
    (FaultKind.FLIP, WRITE, 0.02),
    (FaultKind.LATE, WRITE, 0.01),
    (FaultKind.DUPLICATE, WRITE, 0.01),
    (FaultKind.SLOW, WRITE, 0.03),
    (FaultKind.EIO, READ, 0.01),
    (FaultKind.SHORT, READ, 0.01),
    (FaultKind.FLIP, READ, 0.03),
    (FaultKind.SLOW, READ, 0.03),
    (FaultKind.EIO, SYNC, 0.02),
    (FaultKind.SLOW, SYNC, 0.1),
)


def crowded(setting: Setting) -> Setting:
    """Copies of few pages are begun all the time, and the boot ends while they are being made.

    Nothing else goes wrong: what was there has to come back.
    """
    return replace(
        setting,
        has_nvme=True,
        is_crowd=True,
        segments_max=(1,),
        is_roomy=False,
        policy=WritePolicy.THROUGH,
        streams=4,
        faults=(),
        chances=Chances(slow=0.2),
        refusing=0.0,
        ending=0.03,
        reads_faults=False,
    )


def draw_setting(rng: random.Random) -> Setting:
    is_roomy = rng.random() < 0.5
    devices = rng.randint(1, 2)
    harm = rng.choice(("none", "devices", "everything"))
    return Setting(
        has_nvme=rng.random() < 0.85,
        slabs=rng.randint(2, 4),
        segments_max=(48 if is_roomy else rng.randint(2, 4),) * devices,
        is_roomy=is_roomy,
        policy=rng.choice((WritePolicy.BACK, WritePolicy.THROUGH, WritePolicy.SELECTIVE)),
        streams=rng.choice((1, 4)),
        journal_bytes_max=rng.choice((2048, 1 << 20)),
        faults=()
        if harm == "none"
        else tuple(
            Fault(kind=kind, operation=operation, probability=probability)
            for kind, operation, probability in _FAULTS
        ),
        chances=Chances() if harm == "none" else Chances(timeout=0.008, no_room=0.1),
        refusing=0.02 if harm == "everything" else 0.0,
        ending=rng.choice((0.001, 0.003, 0.008)),
        reads_faults=harm == "everything" and rng.random() < 0.2,
    )
