"""The fp8 codec: e4m3fn codes with one float32 scale per (layer, head) of each packed segment.

    amax   = the largest |x| of the segment's numbers of one layer and head
    scale  = 1 if amax == 0 else max(fl32(amax / 448), 2^-126)
    inv    = fl32(1 / scale)
    code   = RNE_e4m3fn(clamp(fl32(x * inv), -448, 448))
    decode = RNE_dtype(fl32(code * scale))

fl32 is one correctly rounded float32 operation: no fused multiply-add, no flush to zero, no fast
division. The formula is the format: x / scale instead of x * inv gives other codes. Numbers are
checked to be finite before anything else, because a cast alone turns infinity into 448 or NaN and
hides that the page was broken. Segments that are not packed keep their bytes, whatever they hold.

See kvtier/packing/geometry.py for where codes and scales lie. Host memory is packed by compiled
code where numba is installed (kvtier/packing/fp8_numba.py), CUDA memory by triton
(kvtier/packing/fp8_triton.py), everything else by torch (kvtier/packing/fp8_torch.py), which is the
reference: all give the same bytes. `backend` says which one is used, a fallback is logged. None of
them is loaded before the first call, which takes seconds, or `warm_up`.

What goes in decides what comes out: a tensor gives a flat uint8 tensor on its device, anything else
(a bytes-like object, an ndarray) a flat uint8 ndarray. The result is always new memory. Input
numbers may have the segments' dtype or be the bytes as uint8, contiguous or not. Calls are
independent and safe from any thread, provided the thread has not turned on
torch.set_flush_denormal; the caller must own the input.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import Codec
from kvtier.packing import fp8_backend, fp8_torch
from kvtier.packing._torch import is_tensor, load_torch
from kvtier.packing.fp8_backend import Fp8Backend, backend
from kvtier.packing.fp8_check import check_payload
from kvtier.packing.payloads import check_bytes, host_bytes

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

    from kvtier.packing.layout import Layout

__all__ = ["Fp8Backend", "backend", "check_payload", "pack", "unpack", "warm_up"]


@overload
def pack(layout: Layout, raw: torch.Tensor) -> torch.Tensor: ...
@overload
def pack(layout: Layout, raw: Buffer | NDArray[Any]) -> NDArray[np.uint8]: ...
def pack(
    layout: Layout, raw: torch.Tensor | Buffer | NDArray[Any]
) -> torch.Tensor | NDArray[np.uint8]:
    """The fp8 payload of a raw payload: `layout.fp8_bytes` bytes from `layout.raw_bytes`.

    Raises NonFinite, naming segment, layer and head, if a number to pack is infinite or NaN;
    PageSizeError for another size; LayoutError where fp8 is impossible or for numbers of a dtype
    that the layout does not have; MissingExtra without numba and torch.
    """
    layout.payload_bytes(Codec.FP8)
    source = _bytes_of(layout, raw, layout.raw_bytes, "the raw payload")
    payload: torch.Tensor | NDArray[np.uint8] = _converted(layout, source, attrgetter("pack"))
    return payload


@overload
def unpack(layout: Layout, payload: torch.Tensor) -> torch.Tensor: ...
@overload
def unpack(layout: Layout, payload: Buffer | NDArray[Any]) -> NDArray[np.uint8]: ...
def unpack(
    layout: Layout, payload: torch.Tensor | Buffer | NDArray[Any]
) -> torch.Tensor | NDArray[np.uint8]:
    """The raw payload of an fp8 payload: `layout.raw_bytes` bytes, every packed number rounded.

    Raises what `check_payload` raises: a scale is never assumed, and no NaN comes out of a code.
    MissingExtra without numba and torch.
    """
    size = layout.payload_bytes(Codec.FP8)
    source = _bytes_of(layout, payload, size, "the fp8 payload")
    raw: torch.Tensor | NDArray[np.uint8] = _converted(layout, source, attrgetter("unpack"))
    return raw


def warm_up(device: str = "cpu") -> Fp8Backend:
    """Loads what packs memory of this kind, and compiles it where no earlier process has: seconds,
    which no page with a deadline should wait for. Raises MissingExtra without numba and torch.
    """
    return backend(device)


def _bytes_of(layout: Layout, given: Any, want: int, what: str) -> torch.Tensor | NDArray[np.uint8]:
    """`given` as flat bytes where it lies, after checking its size and dtype."""
    if is_tensor(given):
        tensor = fp8_torch.flat_bytes(layout, given, what)
        check_bytes(tensor.numel(), want, what)
        return tensor
    data = host_bytes(given)
    check_bytes(data.nbytes, want, what)
    return data


def _converted(
    layout: Layout,
    source: torch.Tensor | NDArray[np.uint8],
    which: Callable[[object], Callable[[Layout, Any], Any]],
) -> Any:
    """What the implementation for this memory makes of it, in the kind that the caller gave."""
    if isinstance(source, np.ndarray):
        module = fp8_backend.compiled("cpu")
        if module is not None:
            return which(module)(layout, source)
        # A copy: torch cannot wrap read-only memory, and this one is small beside the arithmetic.
        return which(fp8_torch)(layout, load_torch().from_numpy(source.copy())).numpy()
    module = fp8_backend.compiled(source.device.type)
    if module is None:
        return which(fp8_torch)(layout, source)
    if source.device.type == "cpu":
        return load_torch().from_numpy(which(module)(layout, source.numpy()))
    return which(module)(layout, source)
