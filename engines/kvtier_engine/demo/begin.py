"""The engine that begins the chat: computes the first turn, goes on from its own device pages, and
leaves what it has computed to kvtier when it ends.
"""

from __future__ import annotations

import sys
from typing import Any

from kvtier_engine.demo.job import QUESTIONS, Job, answer
from kvtier_engine.demo.talk import Talker, findable


def work(job: Job) -> dict[str, Any]:
    messages = [("user", f"{job.text()}\n\n{QUESTIONS[0]}")]
    with Talker(job) as talker:
        first = talker.ids(messages)
        with talker.speaker(below=True) as speaker:
            done = speaker.answer(first)
            opening = talker.told(done, done, 0)
            messages += [("assistant", done.text), ("user", QUESTIONS[1])]
            second = talker.ids(messages)
            done = speaker.answer(second)
            assert speaker.tiers is not None, "made with them"
            keys = speaker.tiers.keys(second)
            stored = speaker.tiers.namespace.lookup(keys).prefix
        told = talker.told(done, talker.cold(second), findable(first, second))
        return {
            "opening": opening,
            "device": told,
            "pages": len(keys),
            "pages_stored": stored,
            "messages": [*messages, ("assistant", done.text)],
        }


if __name__ == "__main__":
    sys.exit(answer(work))
