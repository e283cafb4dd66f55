"""The tiers of the fake daemon: NVMe as a set of names, a verify that tells what it was told to, a
quarantine to order. See fake_daemon.py; the rules are those of proto/kvtier/v1.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvtier import errors
from kvtier.core.page import Codec, Durability, GetCode, PageRef, Tier
from kvtier.v1 import admin_pb2, pages_pb2

REMEDY = "ask the fake"
CHUNK_BYTES = 4096


@dataclass
class FakeTiers:
    """What a test sets, and reads. A place is (namespace number, shard, key)."""

    is_old: bool = False  # from before there was an NVMe tier
    has_nvme: bool = True
    volatile: set[bytes] = field(default_factory=set)  # keys that never become durable
    durable: set[tuple] = field(default_factory=set)
    tiers: dict[tuple, Tier] = field(default_factory=dict)  # where a get finds it; else host
    unflushed: dict[int, set[tuple]] = field(default_factory=dict)  # by session
    move_codes: dict[bytes, int] = field(default_factory=dict)
    moves: list[tuple[str, list[bytes], str]] = field(default_factory=list)
    expected: list[tuple[bytes, bool, int]] = field(default_factory=list)
    expect_error: errors.KvtierError | None = None
    reports: list[admin_pb2.VerifyProgress] = field(default_factory=list)
    silent_after: int = -1  # a verify says nothing more after so many reports
    verifies: list[tuple[int, int]] = field(default_factory=list)  # (tier, bytes_per_second)
    verifies_ended: int = 0
    quarantine: dict[PageRef, bytes] = field(default_factory=dict)
    quarantined_codec: int = int(Codec.RAW)
    status: list[admin_pb2.TierStatus] = field(
        default_factory=lambda: [admin_pb2.TierStatus(tier=2, capacity_bytes=1 << 30)]
    )
    devices: list[admin_pb2.DeviceStatus] = field(default_factory=list)

    def stored(self, bound, place: tuple, wanted: int) -> Durability:
        """What a page that is stored, or was, has reached."""
        if wanted == Durability.NVME and self.has_nvme and place[2] not in self.volatile:
            self.durable.add(place)
        if place in self.durable:
            return Durability.NVME
        self.unflushed.setdefault(bound.session_id, set()).add(place)
        return Durability.HOST


class TierRpcs:
    """A part of FakeService."""

    async def prefetch(self, request, context):
        await self._enter("prefetch")
        codes = self._move("prefetch", request, request.hints.session)
        return pages_pb2.PrefetchResponse(codes=codes)

    async def demote(self, request, context):
        await self._enter("demote")
        return pages_pb2.DemoteResponse(codes=self._move("demote", request, ""))

    async def expect(self, request, context):
        await self._enter("expect")
        if self._d.tiers.expect_error is not None:
            raise self._d.tiers.expect_error
        self._d.tiers.expected.append((request.key, request.ended, request.return_ms))
        return pages_pb2.ExpectResponse(heeded=True)

    def _move(self, name, request, session):
        tiers = self._d.tiers
        if tiers.is_old:
            raise errors.NotImplementedYet(name, remedy=REMEDY)
        bound, is_stale = self._bound(request.handle)
        keys = self._split(request.keys)
        tiers.moves.append((name, keys, session))
        codes = []
        for key in keys:
            code = tiers.move_codes.get(key, self._code(bound, is_stale, key))
            if code == GetCode.HIT and name == "demote" and not tiers.has_nvme:
                code = GetCode.REFUSED
            codes.append(code)
        return codes

    async def flush(self, request, context):
        await self._enter("flush")
        tiers = self._d.tiers
        if tiers.is_old:
            raise errors.NotImplementedYet("flush", remedy=REMEDY)
        if request.session_id not in self._d.sessions:
            raise errors.UnknownHandle("unknown session", remedy=REMEDY)
        waiting = tiers.unflushed.pop(request.session_id, set())
        lost = {
            place
            for place in waiting
            if not tiers.has_nvme or place[2] in tiers.volatile or place not in self._d.pages
        }
        tiers.durable |= waiting - lost
        return pages_pb2.FlushResponse(pages=len(waiting - lost), pages_lost=len(lost))

    async def verify(self, request, context):
        await self._enter("verify")
        tiers = self._d.tiers
        if request.tier == Tier.NVME and not tiers.has_nvme:
            raise errors.LimitExceeded("this daemon has no tier NVME", remedy=REMEDY)
        tiers.verifies.append((request.tier, request.bytes_per_second))
        try:
            for number, report in enumerate(tiers.reports):
                if number == tiers.silent_after:
                    await asyncio.sleep(3600)
                yield report
        finally:
            tiers.verifies_ended += 1

    async def list_quarantine(self, request, context):
        await self._enter("list_quarantine")
        answer = admin_pb2.ListQuarantineResponse()
        for ref, record in self._d.tiers.quarantine.items():
            page = answer.pages.add(
                fingerprint=bytes(32), shard=1, key=b"k" * 32, length=len(record) - 4096,
                codec=self._d.tiers.quarantined_codec,
            )  # fmt: skip
            if ref.tier is Tier.NVME and not self._d.tiers.is_old:
                answer.devices[:] = ["/mnt/a"]
                page.device, page.age_ms, page.reason = 1, 1500, "it is torn"
            page.ref.boot_id, page.ref.tier = ref.boot_id, int(ref.tier)
            page.ref.slot, page.ref.generation = ref.slot, ref.generation
        return answer

    async def read_quarantine(self, request, context):
        await self._enter("read_quarantine")
        record = self._d.tiers.quarantine.get(_ref(request.ref))
        if record is None:
            raise errors.UnknownHandle("no such copy", remedy=REMEDY)
        for at in range(0, len(record), CHUNK_BYTES):
            yield admin_pb2.ReadQuarantineResponse(data=record[at : at + CHUNK_BYTES])

    async def clear_quarantine(self, request, context):
        await self._enter("clear_quarantine")
        if len(request.refs) > self._d.limits["keys_per_call_max"]:
            raise errors.LimitExceeded("refs", remedy=REMEDY)
        kept = self._d.tiers.quarantine
        wanted = [_ref(ref) for ref in request.refs] or list(kept)
        gone = [ref for ref in wanted if kept.pop(ref, None) is not None]
        return admin_pb2.ClearQuarantineResponse(pages=len(gone))


def _ref(ref):
    return PageRef(ref.boot_id, Tier(ref.tier), ref.slot, ref.generation)
