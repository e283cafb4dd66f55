"""What goes on inside an engine: for tests, benchmarks and those who look for a fault.

Only the thread that makes the steps, or any while none is made.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from kvtier_engine.errors import InvalidRequest
from kvtier_engine.handle import Handle
from kvtier_engine.schedule.sequence import Sequence
from kvtier_engine.settings import Integrity
from kvtier_engine.stepper import Stepper

__all__ = ["Inspection"]


class Inspection:
    """Of one engine; `Engine.inside` has it."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The requests that were taken and have not ended, in the order in which they came."""
        return tuple(job.sequence for job in self._stepper.jobs.values())

    def sequence(self, handle: Handle) -> Sequence:
        """Raises InvalidRequest for a request that has ended, or that no step has taken yet."""
        job = self._stepper.jobs.get(handle.number)
        if job is None:
            raise InvalidRequest(
                f"request {handle.number} is not under way", remedy="look while it is"
            )
        return job.sequence

    def cached_pages(self, tokens: SequenceOf[int]) -> tuple[int, ...]:
        """The pool's pages of the longest prefix of these tokens that lies there, in order."""
        return self._stepper.radix.match(tokens).pages

    def preempt(self, handle: Handle) -> None:
        """Takes its pages from a request, which is computed again from its tokens. Raises
        InvalidRequest as `sequence`, EngineInconsistent for one that does not compute.
        """
        self._stepper.scheduler.preempt(self.sequence(handle))

    def evict(self, pages: int) -> int:
        """Gives up to so many pages of prefixes that no request uses back to the pool; how many."""
        return self._stepper.scheduler.evict(pages)

    def set_integrity(self, integrity: Integrity) -> None:
        """The steps from now on check tags, or do not, whatever the engine was made with."""
        self._stepper.set_integrity(integrity)
