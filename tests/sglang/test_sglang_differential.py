"""Side pools with SGLang's own host pools and transfers, against its own file backend."""

from __future__ import annotations

import pytest
from sglang_rig import needs_sglang
from test_sglang_hicache import extra

pytestmark = [needs_sglang, pytest.mark.timeout(240)]


@pytest.mark.parametrize("is_latent", [False, True], ids=["heads", "latent"])
@pytest.mark.parametrize("interface_v1", [1, 0], ids=["v1", "generic"])
@pytest.mark.parametrize("seed", range(3))
def test_random_calls_come_to_what_the_file_backend_makes_of_them(
    roomy, walks, seed, interface_v1, is_latent
):
    patient = {f"kvtier_{call}_deadline": 5.0 for call in ("exists", "get", "set")}
    found = walks.differ(
        seed=seed,
        steps=600,
        extra=extra(roomy, interface_v1=interface_v1, **patient),
        is_latent=is_latent,
    )
    assert found.get("difference", "none was run") is None, found
    assert min(found["hits"], found["misses"], found["lengths"], found["gaps"]) > 2, found
