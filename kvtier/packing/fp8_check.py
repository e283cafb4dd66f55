"""What makes an fp8 payload unusable, found with numpy alone: the daemon runs this without torch.

The caller must own the bytes: a check of memory that someone else can write proves nothing.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import Codec
from kvtier.errors import NonFinite
from kvtier.packing.dtypes import FLOAT_MAX
from kvtier.packing.geometry import Span, plan_page
from kvtier.packing.payloads import check_bytes, host_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvtier.packing.layout import Layout

__all__ = ["CODE_MAX", "SCALE_MIN", "check_payload", "check_scales", "refuse_at"]

#: The largest number of e4m3fn.
CODE_MAX: Final = 448.0
#: The smallest normal float32: below it 1 / scale would overflow or lose bits.
SCALE_MIN: Final = 2.0**-126
_NAN_BITS: Final = 0x7F


def check_payload(layout: Layout, payload: Buffer | NDArray[Any]) -> None:
    """Raises NonFinite, naming segment, layer and head, for an fp8 payload that no packer makes.

    That is a scale that is not finite, not positive, below 2^-126 or so large that the largest code
    would leave the segment's dtype, or a code that stands for NaN. Raises PageSizeError for a
    payload of another size, so scales can never be missing, and LayoutError where fp8 is
    impossible.
    """
    plan = plan_page(layout, Codec.FP8)
    data = host_bytes(payload)
    check_bytes(data.nbytes, plan.nbytes, "the fp8 payload")
    scales = np.frombuffer(data, "<f4", plan.scales_count, plan.scales_offset)
    check_scales(plan.spans, scales)
    for span in plan.spans:
        if not span.is_packed:
            continue
        codes = data[span.offset : span.offset + span.nbytes]
        is_nan = (codes & _NAN_BITS) == _NAN_BITS
        if is_nan.any():
            refuse_at(layout, span, int(is_nan.argmax()), "a code that stands for NaN")


def check_scales(spans: tuple[Span, ...], scales: NDArray[np.float32]) -> None:
    """Raises NonFinite for the first scale that no packer makes; `scales` are the payload's."""
    for span in spans:
        if not span.is_packed:
            continue
        layers, heads = span.scale_shape
        mine = scales[span.scale_start : span.scale_start + layers * heads]
        largest = np.float32(FLOAT_MAX[span.segment.dtype]) / np.float32(CODE_MAX)
        # Written so that NaN, which compares false with everything, is bad too.
        bad = ~((mine >= np.float32(SCALE_MIN)) & (mine <= largest))
        if bad.any():
            index = int(bad.argmax())
            layer, head = divmod(index, heads)
            _refuse(span, layer, head, f"the scale {float(mine[index])!r}")


def refuse_at(layout: Layout, span: Span, index: int, what: str) -> NoReturn:
    """Raises NonFinite for the number at `index` of the span's numbers in storage order."""
    assert 0 <= index < prod(span.shape)
    place = dict(zip(layout.storage_order, np.unravel_index(index, span.shape), strict=True))
    _refuse(span, int(place["L"]), int(place["H"]), what)


def _refuse(span: Span, layer: int, head: int, what: str) -> NoReturn:
    raise NonFinite(
        f"segment {span.segment.name!r}, layer {span.layers[0] + layer}, "
        f"head {span.heads[0] + head}: {what}",
        remedy="recompute the page; if it happens again, look for overflow in the model's KV",
    )
