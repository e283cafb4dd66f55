"""Ending a namespace's generation, by the family's fingerprint: no handle is needed, so that
whoever is refused one can still bump the namespace to the weights that it has.

Belongs to the event loop of its connection.
"""

from __future__ import annotations

import os
from typing import Final

from kvtier.client.link import Link
from kvtier.errors import UnknownNamespace
from kvtier.transfer.planes.deadline import Deadline

__all__ = ["bump_family"]

_TOKEN_BYTES: Final = 16


async def bump_family(
    link: Link,
    fingerprint: bytes,
    *,
    weights_revision: str,
    expected: int | None,
    token: bytes | None,
    deadline: Deadline,
) -> int:
    """The new generation; without `expected` it ends the present one. Raises GenerationConflict,
    UnknownNamespace, and when the daemon does not answer.
    """
    if expected is None:
        expected = await _present_generation(link, fingerprint, deadline)
    with link.guarded():
        return await link.plane.bump(
            fingerprint,
            expected=expected,
            weights_revision=weights_revision,
            token=os.urandom(_TOKEN_BYTES) if token is None else token,
            deadline=deadline,
        )


async def _present_generation(link: Link, fingerprint: bytes, deadline: Deadline) -> int:
    with link.guarded():
        status = await link.plane.status(deadline)
    for namespace in status.namespaces:
        if namespace.fingerprint == fingerprint:
            return namespace.generation
    raise UnknownNamespace(
        f"no namespace with fingerprint {fingerprint.hex()}",
        remedy="open it first; `kvtier status` lists what there is",
    )
