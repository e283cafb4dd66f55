"""Named places where the process can be made to die, so that tests can see what a restart finds.

Armed with "name" or "name:n" (the n-th time it is reached; the daemon takes it from the variable
KVTIER_CRASH_POINT): the process ends there by SIGKILL, without unwinding. Not armed, a crash point
is one comparison. Any thread.
"""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import dataclass, field
from typing import Final

__all__ = ["CRASH_POINTS", "arm_crash_point", "crash_point", "is_armed", "parse_crash_point"]

#: Every place, and what has happened when it is reached.
CRASH_POINTS: Final = {
    "put.verified": "a page is whole in its slot and not findable yet",
    "put.sealed": "a page is findable in host memory",
    "local.written": "pages that came by shared memory have their headers, and are not findable",
    "local.sealed": "pages that came by shared memory are findable, and not answered",
    "demote.before_write": "the segment is journalled, no byte of the record is written",
    "demote.written": "the record is on the device, the copy is not findable yet",
    "demote.sealed": "the copy on NVMe is findable",
    "promote.read": "the record is read into its slot in host memory",
    "promote.sealed": "the copy in host memory is findable",
    "segment.created": "a segment file is made, and not used yet",
    "device.before_note": "a journal is begun, and a device has not noted it yet",
    "device.noted": "a device has noted how far the daemon directory has got",
    "journal.half": "half of the bytes of an append are written",
    "journal.written": "an append is written and not synced",
    "checkpoint.begun": "the next journal is begun, the checkpoint is not written",
    "checkpoint.written": "the checkpoint is written under its temporary name",
    "checkpoint.renamed": "the checkpoint has its name, old journals are still there",
    "delete.journalled": "a delete is durable and not answered",
    "bump.saved": "a bump is durable and not answered",
}


@dataclass(slots=True)
class _Armed:
    name: str = ""
    nth: int = 0
    reached: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


_armed: Final = _Armed()


def parse_crash_point(text: str) -> tuple[str, int]:
    """(name, n). Raises ValueError."""
    name, colon, nth = text.partition(":")
    if name not in CRASH_POINTS:
        raise ValueError(f"no crash point {name!r}; there are {', '.join(CRASH_POINTS)}")
    if colon and not (nth.isdecimal() and 1 <= int(nth) <= 1_000_000):
        raise ValueError("after the colon comes a number from 1 to 1000000")
    return name, int(nth) if colon else 1


def arm_crash_point(text: str) -> None:
    """From now on the process dies at that place; empty: nowhere. Raises ValueError."""
    _armed.name, _armed.nth = parse_crash_point(text) if text else ("", 0)
    _armed.reached = itertools.count(1)


def is_armed(name: str) -> bool:
    """The process may die at that place: for what is done otherwise only to reach it."""
    return _armed.name == name


def crash_point(name: str) -> None:
    """Dies here if it is armed for this place and this time."""
    if _armed.name == name and next(_armed.reached) == _armed.nth:
        os.kill(os.getpid(), signal.SIGKILL)
