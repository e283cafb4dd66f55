"""Raw payload to stored payload and back, by codec. Pure functions, safe from any thread.

Both take bytes-like objects, ndarrays and tensors and give a flat uint8 ndarray in host memory. For
RAW that is a view of the input where the input is contiguous host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import Codec
from kvtier.packing import fp8
from kvtier.packing.payloads import check_bytes, host_bytes

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

    from kvtier.packing.layout import Layout

__all__ = ["decode", "encode"]


def encode(
    codec: Codec, layout: Layout, raw: Buffer | NDArray[Any] | torch.Tensor
) -> NDArray[np.uint8]:
    """The payload of `layout.payload_bytes(codec)` bytes.

    Raises as `fp8.pack`; for RAW only PageSizeError.
    """
    data = host_bytes(raw)
    if codec == Codec.FP8:
        return fp8.pack(layout, data)
    check_bytes(data.nbytes, layout.raw_bytes, "the raw payload")
    return data


def decode(
    codec: Codec, layout: Layout, payload: Buffer | NDArray[Any] | torch.Tensor
) -> NDArray[np.uint8]:
    """The raw payload of `layout.raw_bytes` bytes. Raises as `fp8.unpack`; for RAW only
    PageSizeError.
    """
    data = host_bytes(payload)
    if codec == Codec.FP8:
        return fp8.unpack(layout, data)
    check_bytes(data.nbytes, layout.raw_bytes, "the raw payload")
    return data
