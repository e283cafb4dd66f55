"""Side pools of a model, with what stores them, for tests of the binding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from pool_rig import (
    IDENTITY,
    PAGE,
    index_pool,
    latent_pool,
    pool_with_heads,
    slots_of,
    states_pool,
)

from kvtier_sglang.layouts import Ranks
from kvtier_sglang.options import Options
from kvtier_sglang.side_pools import Model, side_pool
from kvtier_sglang.sides import SidePools

__all__ = ["FIRST", "LATENT", "MODEL", "POOLS", "sides_for", "transfer"]

FIRST = "page_first_direct"
MODEL = Model(
    identity=IDENTITY,
    ranks=Ranks(),
    page_tokens=PAGE,
    is_replicated=False,
    stated_format="auto",
    draft="d",
    state_kernels="triton",
)
LATENT = replace(MODEL, is_replicated=True)
Made = tuple[Callable[..., Any], Model]
#: For each kind of pool one that has it, as a function of the seed, and its model.
POOLS: dict[str, Made] = {
    "swa": (lambda **options: pool_with_heads(FIRST, **options), MODEL),
    "mamba": (states_pool, MODEL),
    "indexer": (lambda **options: index_pool(FIRST, **options), LATENT),
    "draft": (lambda **options: latent_pool(FIRST, **options), LATENT),
}


def sides_for(
    connection: Any,
    *names: str,
    seed: int = 0,
    model: Model | None = None,
    pools: Mapping[str, Made] = POOLS,
    **options: Any,
) -> tuple[SidePools, dict[str, Any]]:
    """Side pools of these names, no two with the same content, and the pools themselves."""
    made = SidePools(connection, Options(**({"exists_deadline": 5.0} | options)))
    given = {}
    for number, name in enumerate(names):
        make, own = pools[name]
        given[name] = make(seed=seed + 10 * number)
        made.add(side_pool(name, given[name], model or own))
    return made, given


def transfer(
    name: str,
    keys: list[str] | None = None,
    places: list[int] | None = None,
    policy: str = "all_pages",
) -> Any:
    """What SGLang asks of a pool."""
    slots = None
    if places is not None:
        slots = torch.tensor(places) if name == "mamba" else slots_of(places)
    return SimpleNamespace(name=name, keys=keys, host_indices=slots, hit_policy=policy)
