"""What an engine is set to, and what its pages are. Values, usable from any thread."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from kvtier import Layout
from kvtier.client.device import FP8_COMPUTE, PageForm, fp8_layout
from kvtier_engine.attention.choice import kernel_name
from kvtier_engine.model.load import LoadedModel
from kvtier_engine.model.products import PRODUCTS

__all__ = ["EngineSettings", "Integrity", "KvCacheDtype", "layout_of"]


class Integrity(enum.Enum):
    """TAGS compares the tags of all pages that a pass reads with those that were given."""

    TAGS = "tags"
    OFF = "off"


class KvCacheDtype(enum.Enum):
    """AS_COMPUTED keeps KV in the network's own dtype, FP8_E4M3 in half of bfloat16's bytes."""

    AS_COMPUTED = "as_computed"
    FP8_E4M3 = "fp8_e4m3"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """`queue_requests_max` may wait, `running_requests_max` have pages at a time.

    A prefill pass has `chunk_pages` whole pages. KV depends, in its last bits, on the pass that
    computed it: so a cache hit ends at a multiple of them, and a prompt's KV is the same with it.
    """

    queue_requests_max: int = 256
    running_requests_max: int = 64
    chunk_pages: int = 1
    integrity: Integrity = Integrity.OFF


def layout_of(
    model: LoadedModel,
    *,
    page_tokens: int,
    chunk_pages: int = 1,
    kv_cache: KvCacheDtype = KvCacheDtype.AS_COMPUTED,
) -> Layout:
    """What the pages of this model's KV are, for the pool and for kvtier.

    What an engine is told to do another way is named by the layout, so that engines that do not do
    the same do not find each other's pages: weights, dtype, page and chunk size, type of device,
    attention's kernel, how products are computed, and the form that attention reads. With the same
    processor, build of torch and number of threads the pages are then the same to the bit. Those
    three are not named: torch sums in another order with them, which changes last bits, most often
    in float32, and replicas that differ in nothing else should find each other's pages.
    """
    network = model.network
    plain = Layout.from_hf(
        network.config.hf,
        revision=model.revision,
        page_tokens=page_tokens,
        dtype=network.dtype,
        model_id=model.name,
    )
    is_fp8 = kv_cache is KvCacheDtype.FP8_E4M3
    made = fp8_layout(plain) if is_fp8 else plain
    kernel = kernel_name(network.device, PageForm.of(made))
    # Of fp8 pages also the dtype of those who compute with them, and the rule of their scales.
    how = [f"{FP8_COMPUTE}, scales 2^n"] if is_fp8 else []
    how += [plain.kv_compute, kernel, PRODUCTS, f"chunks of {chunk_pages * page_tokens}"]
    return dataclasses.replace(made, kv_compute=", ".join(how))
