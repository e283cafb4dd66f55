"""One page on its way from one tier to another, as a table. A page never moves: it is copied, then
retired.

    reserve --> RESERVED --copy--> COPIED --verify--> VERIFIED --publish--> DONE
                         |                  |                  |
                         +------------------+-- fail / lose ---+---> FAILED
                         +--strand--> FAILED

* the source stays SEALED, leased and findable until the target is: at no moment is the page in
  neither tier;
* bytes are verified before anyone can find them: those that come up, in the target's place; those
  that go down, as they are handed to the device, which is found out when they are read;
* `publish` seals and indexes the target; retiring the source is a second, separate step that only
  DONE allows.

Pure: the mover (transfer/) does the copying between the events. One Movement belongs to one thread.
"""

from __future__ import annotations

from enum import IntEnum

from kvtier.core.handles import Filling, Reading
from kvtier.core.lifecycle import IllegalTransition
from kvtier.core.page import PutCode

__all__ = ["TRANSITIONS", "Movement", "Phase", "Step"]


class Phase(IntEnum):
    RESERVED = 1
    COPIED = 2
    VERIFIED = 3
    DONE = 4
    FAILED = 5


class Step(IntEnum):
    COPY = 1
    VERIFY = 2
    PUBLISH = 3
    LOSE = 4
    FAIL = 5
    STRAND = 6


TRANSITIONS: dict[tuple[Phase, Step], Phase] = {
    (Phase.RESERVED, Step.COPY): Phase.COPIED,
    (Phase.COPIED, Step.VERIFY): Phase.VERIFIED,
    (Phase.VERIFIED, Step.PUBLISH): Phase.DONE,
    (Phase.VERIFIED, Step.LOSE): Phase.FAILED,
    (Phase.RESERVED, Step.FAIL): Phase.FAILED,
    (Phase.RESERVED, Step.STRAND): Phase.FAILED,
    (Phase.COPIED, Step.FAIL): Phase.FAILED,
    (Phase.VERIFIED, Step.FAIL): Phase.FAILED,
}


class Movement:
    """Holds the source (leased) and the target (filling) of one move; ends both exactly once."""

    def __init__(self, source: Reading, target: Filling) -> None:
        self.source = source
        self.target = target
        self.phase = Phase.RESERVED

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.DONE, Phase.FAILED)

    def copied(self) -> None:
        """All bytes of the record are in the target's slot."""
        self._step(Step.COPY)

    def verified(self) -> None:
        """The target's bytes have passed their checksum."""
        self._step(Step.VERIFY)

    def publish(self) -> PutCode:
        """Makes the target findable and lets go of the source. Anything but STORED: the move is
        off."""
        if (self.phase, Step.PUBLISH) not in TRANSITIONS:
            self._step(Step.PUBLISH)
        code = self.target.seal()
        self._step(Step.PUBLISH if code is PutCode.STORED else Step.LOSE)
        self.source.release()
        return code

    def fail(self) -> None:
        """Gives the target back and lets go of the source, which is as it was."""
        self._step(Step.FAIL)
        self.target.abandon()
        self.source.release()

    def strand(self) -> None:
        """The copying does not end: nobody can say when its last byte is read and written.

        The target is quarantined (`Store.settle_orphan` ends that), and the source stays held: its
        `release` is the caller's, when the copying has ended after all.
        """
        self._step(Step.STRAND)
        self.target.orphan()

    def _step(self, step: Step) -> None:
        try:
            self.phase = TRANSITIONS[self.phase, step]
        except KeyError:
            raise IllegalTransition(f"{step.name} cannot happen in {self.phase.name}") from None
