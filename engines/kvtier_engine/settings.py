"""What an engine is set to, and what its pages are. Values, usable from any thread."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

import torch

from kvtier import Layout
from kvtier.client.device import FP8_COMPUTE, fp8_layout
from kvtier_engine.attention.choice import kernel_for
from kvtier_engine.model.load import LoadedModel

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

    Whatever changes a bit of them is named by the layout, so that only engines that compute the
    same bits find each other's pages: weights, dtype, page and chunk size, attention's kernel, and
    the form that attention reads. What is not named is the machine: torch's kernels for another
    processor may round another way.
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
    kernel = kernel_for(network.device, torch.float8_e4m3fn if is_fp8 else network.dtype)
    # Of fp8 pages also the dtype of those who compute with them, and the rule of their scales.
    how = [f"{FP8_COMPUTE}, scales 2^n"] if is_fp8 else []
    how += [plain.kv_compute, kernel.value, f"chunks of {chunk_pages * page_tokens}"]
    return dataclasses.replace(made, kv_compute=", ".join(how))
