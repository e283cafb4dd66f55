"""Payload bytes as callers hold them (bytes-like, ndarray, tensor) seen as one flat uint8 array.

No copy is made of contiguous host memory: whoever needs bytes that cannot change copies them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import PageSizeError
from kvtier.packing._torch import is_tensor

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

__all__ = ["check_bytes", "host_bytes"]


def host_bytes(payload: Buffer | NDArray[Any] | torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of `payload` in host memory, flat.

    A view of contiguous host memory; a copy of strided arrays and of tensors on another device.
    """
    if isinstance(payload, np.ndarray):
        return np.ascontiguousarray(payload).reshape(-1).view(np.uint8)
    if is_tensor(payload):
        flat = payload.detach().contiguous().reshape(-1)
        return np.asarray(flat.view(_uint8_of(payload)).cpu().numpy())
    view = memoryview(cast("Buffer", payload))
    if not view.c_contiguous:
        return np.frombuffer(view.tobytes(), np.uint8)
    return np.frombuffer(view.cast("B") if view.nbytes else b"", np.uint8)


def check_bytes(have: int, want: int, what: str) -> None:
    """Raises PageSizeError unless `have` bytes are exactly the `want` that the layout says."""
    if have != want:
        raise PageSizeError(
            f"{what} has {have} bytes, the layout says {want}",
            remedy="pass the page of exactly this shard, as packed by the codec that is named",
        )


def _uint8_of(tensor: torch.Tensor) -> torch.dtype:
    # The module comes from the tensor itself, so that torch is never loaded here.
    dtype: torch.dtype = tensor.new_empty(0).byte().dtype
    return dtype
