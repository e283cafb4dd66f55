"""The engine that goes on with a chat that another process began: from host memory, from a page
that was damaged there, and (measured beside) from pages packed as fp8. At the end all is on NVMe.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from kvtier import Codec
from kvtier.client.device import DevicePool, PageTransfer
from kvtier.client.sync import Namespace
from kvtier_engine.demo.damage import flip_payload_byte
from kvtier_engine.demo.job import PAGE_TOKENS, QUESTIONS, Job, answer
from kvtier_engine.demo.talk import TENANT, Talker, findable
from kvtier_engine.errors import DemoFailed
from kvtier_engine.fidelity.measures import divergence
from kvtier_engine.fidelity.scorer import Scorer
from kvtier_engine.schedule.request import Completion

DURABLE_SECONDS_MAX = 60.0


def work(job: Job) -> dict[str, Any]:
    # The chat until now ends with an answer.
    messages = [*job.messages, ("user", QUESTIONS[2])]
    with Talker(job) as talker:
        before, ids = talker.ids(job.messages[:-1]), talker.ids(messages)
        reference = talker.cold(ids)
        with talker.speaker(below=True) as speaker:
            host = talker.told(speaker.answer(ids), reference, findable(before, ids))
        space = talker.connection.namespace(talker.layout, tenant=TENANT)
        damaged = _damaged(talker, space, ids, reference)
        fp8 = _packed(talker, space, ids) | _quality(talker, ids, reference)
        return {
            "host": host,
            "damaged": damaged,
            "fp8": fp8,
            "messages": [*messages, ("assistant", reference.text)],
        }


def _damaged(
    talker: Talker, space: Namespace, ids: Sequence[int], reference: Completion
) -> dict[str, Any]:
    """One byte of one stored page is flipped: that page must not come back, the text must."""
    expected = findable(ids, ids)
    keys = space.keys(ids)[: expected // PAGE_TOKENS]
    victim = len(keys) // 2
    scratch = torch.empty((1, talker.layout.raw_bytes // 2), dtype=talker.model.network.dtype)
    ref = space.get([keys[victim]], out=scratch)[0].ref
    assert ref is not None, "it was stored a moment ago"
    flip_payload_byte(talker.job.daemon_pid, ref.slot, at=talker.layout.raw_bytes // 2)
    with talker.speaker(below=True) as speaker:
        told = talker.told(speaker.answer(ids), reference, expected)
        loads = speaker.load_counts()
    with talker.speaker(below=True) as speaker:
        again = speaker.answer(ids, tokens=1).cached.host
    return {**told, "page": victim, "loads": loads, "host_after_storing_it_again": again}


def _packed(talker: Talker, space: Namespace, ids: Sequence[int]) -> dict[str, Any]:
    """Makes the pages durable, and packs them to fp8 for a tenant that asks for that: a key has one
    stored form.
    """
    layout = talker.layout
    other = talker.connection.namespace(layout, tenant=f"{TENANT}-fp8")
    keys, other_keys = space.keys(ids), other.keys(ids)
    count = len(keys)
    pool = DevicePool(layout, count)
    pages = pool.allocate(count)
    with PageTransfer(pool, space) as plain, PageTransfer(pool, other) as packed:
        if lost := plain.load(keys, pages).failed:  # what is in these would be stored as theirs
            raise DemoFailed(
                f"pages {lost} of {count}, stored a moment ago, did not come back",
                remedy="run it again on a machine with more memory free",
            )
        durable = space.put(
            keys, pool.kv[pages], durable="nvme", deadline=DURABLE_SECONDS_MAX
        ).durable
        packed.offload(other_keys, pages, codec=Codec.FP8)
        taken = packed.load(other_keys, pages, lossy_ok=True)
        refused = packed.load(other_keys, pages)
    pool.free(pages)
    return {
        "pages": count,
        "durable": durable,
        "hits": taken.hits,
        "hits_without_lossy_ok": refused.hits,
        "page_bytes": layout.payload_bytes(Codec.FP8),
        "raw_page_bytes": layout.raw_bytes,
    }


def _quality(talker: Talker, ids: Sequence[int], reference: Completion) -> dict[str, Any]:
    """fp8 changes numbers, so it is measured: along the reference's tokens, place by place."""
    stored = findable(ids, ids)
    rest = [*ids[stored:], *reference.tokens[:-1]]
    scorer = Scorer(talker.model, page_tokens=PAGE_TOKENS, tokens_max=stored + len(rest))
    logits = scorer.logits(ids[:stored], [rest], [Codec.RAW, Codec.FP8])
    places = len(reference.tokens)
    apart = divergence(*(logits[codec][0][-places:] for codec in (Codec.RAW, Codec.FP8)))
    return {
        "tokens": apart.tokens,
        "tokens_same": apart.same_choice,
        "kl_mean": apart.kl_mean,
        "kl_max": apart.kl_max,
    }


if __name__ == "__main__":
    sys.exit(answer(work))
