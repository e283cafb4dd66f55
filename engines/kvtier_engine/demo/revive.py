"""The engine that comes after a crash of the daemon: goes on from what the NVMe tier kept."""

from __future__ import annotations

import sys
from typing import Any

from kvtier_engine.demo.job import PAGE_TOKENS, QUESTIONS, Job, answer
from kvtier_engine.demo.talk import Talker, findable


def work(job: Job) -> dict[str, Any]:
    messages = [*job.messages, ("user", QUESTIONS[3])]
    with Talker(job) as talker:
        before, ids = talker.ids(job.messages[:-1]), talker.ids(messages)
        reference = talker.cold(ids)
        expected = findable(before, ids)
        with talker.speaker(below=True) as speaker:
            told = talker.told(speaker.answer(ids), reference, expected)
            loads = speaker.load_counts()
            assert speaker.tiers is not None, "made with them"
            keys = speaker.tiers.keys(ids)[: expected // PAGE_TOKENS]
    return {**told, "loads": loads, "keys": [key.hex() for key in keys]}


if __name__ == "__main__":
    sys.exit(answer(work))
