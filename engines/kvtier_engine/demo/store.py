"""The demo's use of the kvtier client: two namespaces of one model, one raw and one packed to fp8.

They are two tenants, because a key has one stored form and the demo wants to compare both.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

import kvtier
from kvtier.client import Connection, Namespace
from kvtier_engine.causal_lm import CausalLM
from kvtier_engine.demo.job import PAGE_TOKENS, Job
from kvtier_engine.smollm2 import MODEL_ID

__all__ = ["Fetched", "Store"]

DEADLINE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The answer of a get: the leading pages that hit, and what came of every key.

    `tiers` has one entry a hit; `slots` is -1 for a page that is none. `bytes_at_rest` counts the
    payloads of the leading hits as they are stored.
    """

    pages: torch.Tensor
    reasons: list[str]
    tiers: list[str]
    slots: list[int]
    bytes_at_rest: int
    seconds: float


class Store:
    """A connection and its namespaces. Not shared between threads."""

    def __init__(self, connection: Connection, layout: kvtier.Layout, lm: CausalLM) -> None:
        config = lm.model.config
        self._connection = connection
        self._layout = layout
        self._page_shape = (
            2,
            config.num_hidden_layers,
            layout.page_tokens,
            config.num_key_value_heads,
            config.head_dim,
        )
        self._raw = connection.namespace(layout, tenant="demo")
        self._packed = connection.namespace(layout, tenant="demo-fp8")

    @classmethod
    def connect(cls, job: Job, lm: CausalLM) -> Store:
        config = json.loads(Path(job.model_dir, "config.json").read_text(encoding="utf-8"))
        layout = kvtier.Layout.from_hf(
            config,
            revision=job.revision,
            page_tokens=PAGE_TOKENS,
            dtype=lm.model.dtype,
            model_id=MODEL_ID,
        )
        kvtier.warm_up()
        return cls(kvtier.connect(job.url, deadline=DEADLINE_SECONDS), layout, lm)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def put(
        self, ids: list[int], pages: torch.Tensor, *, packed: bool, durable: bool = False
    ) -> int:
        """Stores the full pages of the prompt `ids`; how many of them are in the cache then, or
        with `durable` on NVMe.

        Raises the error of the first page that is refused.
        """
        space = self._space(packed)
        keys = self.keys(ids)
        result = space.put(
            keys,
            pages[: len(keys)],
            codec=self._codec(packed),
            durable="nvme" if durable else "host",
        )
        result.raise_for_refused()
        return result.durable if durable else result.stored

    def keys(self, ids: list[int]) -> list[bytes]:
        """Of the full pages of the prompt `ids`."""
        return list(self._raw.keys(ids)[: self.full_pages(ids)])

    def get(self, ids: list[int], *, packed: bool, lossy_ok: bool = True) -> Fetched:
        """The leading pages of the prompt `ids` that are there and whole."""
        started = time.monotonic()
        space = self._space(packed)
        keys = self.keys(ids)
        pool = torch.empty((len(keys), *self._page_shape), dtype=torch.bfloat16)
        got = space.get(keys, out=pool, lossy_ok=packed and lossy_ok)
        seconds = time.monotonic() - started
        items = list(got)
        return Fetched(
            pages=pool[: got.prefix],
            reasons=[item.reason.name for item in items],
            tiers=[item.tier.name for item in items if item.tier is not None],
            slots=[item.ref.slot if item.ref else -1 for item in items],
            bytes_at_rest=got.prefix * self._layout.payload_bytes(self._codec(packed)),
            seconds=seconds,
        )

    @property
    def raw_bytes(self) -> int:
        return self._layout.raw_bytes

    def full_pages(self, ids: list[int]) -> int:
        """How many pages of this prompt are worth storing: all that leave a token to compute."""
        return (len(ids) - 1) // PAGE_TOKENS

    def _space(self, packed: bool) -> Namespace:
        return self._packed if packed else self._raw

    @staticmethod
    def _codec(packed: bool) -> kvtier.Codec:
        return kvtier.Codec.FP8 if packed else kvtier.Codec.RAW
