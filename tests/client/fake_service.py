"""The rpcs of the fake daemon; see fake_daemon.py. The rules are those of proto/kvtier/v1."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvtier import errors
from kvtier.core.page import Codec, DeleteCode, Durability, GetCode, LeaseCode, PutCode, Tier
from kvtier.packing.checksum import verify_payload
from kvtier.packing.layout import Layout
from kvtier.transfer import rpc, wire
from kvtier.transfer.messages import layout_from_proto
from kvtier.v1 import admin_pb2, pages_pb2, transfer_pb2
from tests.client.fake_tiers import REMEDY, TierRpcs


@dataclass
class Family:
    weights_revision: str
    generation: int = 1
    number: int = 0
    tokens: dict[bytes, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Bound:
    """What a handle means for life."""

    fingerprint: bytes
    generation: int
    number: int
    layout: Layout
    session_id: int


@dataclass
class Stored:
    data: bytes
    codec: int
    payload_sum: bytes
    origin_sum: bytes
    lossy: bool
    parent: bytes
    depth: int
    session: str
    ttl_ms: int
    generation: int


def split(keys: bytes, limit: int) -> list[bytes]:
    if len(keys) % 32:
        raise errors.KeyLengthError("not whole keys", remedy=REMEDY)
    if len(keys) // 32 > limit:
        raise errors.LimitExceeded(f"{len(keys) // 32} keys", remedy=REMEDY)
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


class FakeService(TierRpcs):
    def __init__(self, daemon) -> None:
        self._d = daemon

    async def _enter(self, name: str) -> None:
        self._d.calls[name] += 1
        if name in self._d.stall:
            await asyncio.sleep(3600)
        if name in self._d.raise_in:
            raise self._d.raise_in[name]

    def _bound(self, handle: int) -> tuple[Bound, bool]:
        bound = self._d.handles.get(handle)
        if bound is None:
            raise errors.UnknownHandle(f"handle {handle}", remedy=REMEDY)
        family = self._d.families.get(bound.fingerprint)
        return bound, family is None or family.number != bound.number

    async def open_namespace(self, request, context):
        await self._enter("open")
        d = self._d
        layout = layout_from_proto(request.layout, request.shard)
        fingerprint = layout.fingerprint(request.tenant, request.salt)
        if request.fingerprint and request.fingerprint != fingerprint:
            raise errors.LayoutError("fingerprint differs", remedy=REMEDY)
        if request.session_id and request.session_id not in d.sessions:
            raise errors.UnknownHandle("unknown session", remedy=REMEDY)
        family = d.families.get(fingerprint)
        if family is None:
            family = d.families[fingerprint] = Family(layout.weights_revision, number=d.next())
        if family.weights_revision != layout.weights_revision:
            raise errors.NamespaceMismatch(
                f"weights_revision: {family.weights_revision!r}", remedy=REMEDY
            )
        session_id = request.session_id or d.rng.getrandbits(63)
        d.sessions.add(session_id)
        handle = d.rng.getrandbits(63)
        d.handles[handle] = Bound(fingerprint, family.generation, family.number, layout, session_id)
        return pages_pb2.OpenNamespaceResponse(
            session_id=session_id,
            handle=handle,
            boot_id=d.boot_id,
            fingerprint=fingerprint,
            generation=family.generation,
            raw_bytes=layout.raw_bytes,
            fp8_bytes=layout.fp8_bytes,
        )

    async def close_session(self, request, context):
        await self._enter("close_session")
        self._d.sessions.discard(request.session_id)
        return pages_pb2.CloseSessionResponse()

    async def lookup(self, request, context):
        await self._enter("lookup")
        bound, is_stale = self._bound(request.handle)
        keys = split(request.keys, self._d.limits["keys_per_call_max"])
        codes = [self._code(bound, is_stale, key) for key in keys]
        tiers = [
            self._tier(bound, key) if code == GetCode.HIT else 0
            for key, code in zip(keys, codes, strict=True)
        ]
        return pages_pb2.LookupResponse(codes=codes, tiers=tiers)

    async def put(self, requests, context):
        await self._enter("put")
        d = self._d
        bound, is_stale, opened = None, False, None
        announced: list[transfer_pb2.PutPage] = []
        run = bytearray()
        async for message in requests:
            if message.open is not None:
                opened = message.open
                d.puts.append(opened)
                bound, is_stale = self._bound(opened.handle)
                if d.tiers.is_old and opened.durability == Durability.NVME:
                    raise errors.NotImplementedYet("durability NVME", remedy=REMEDY)
            announced += message.pages
            assert message.offset == len(run) or not message.data
            run += message.data
        assert bound is not None
        assert opened is not None
        if len(announced) > d.limits["pages_per_put_max"]:
            raise errors.LimitExceeded("pages", remedy=REMEDY)
        if len(run) > d.limits["bytes_per_call_max"] or len(run) != sum(
            p.length for p in announced
        ):
            raise errors.LimitExceeded("bytes", remedy=REMEDY)
        answer = transfer_pb2.PutResponse(boot_id=d.boot_id)
        at = 0
        for page in announced:
            data = bytes(run[at : at + page.length])
            at += page.length
            code, generation = self._store(bound, is_stale, opened, page, data)
            answer.codes.append(code)
            answer.slots.append(generation)
            answer.generations.append(generation)
            if not d.tiers.is_old:
                answer.reached.append(self._reached(bound, opened, page.key, code))
        return answer

    def _reached(self, bound, opened, key, code):
        if not PutCode(code).is_stored:
            return 0
        place = (bound.number, bound.layout.shard.index, key)
        return int(self._d.tiers.stored(bound, place, opened.durability))

    def _tier(self, bound, key):
        place = (bound.number, bound.layout.shard.index, key)
        return int(self._d.tiers.tiers.get(place, Tier.HOST))

    def _split(self, keys):
        return split(keys, self._d.limits["keys_per_call_max"])

    def _store(self, bound, is_stale, opened, page, data):
        d = self._d
        place = (bound.number, bound.layout.shard.index, page.key)
        if page.key in d.put_codes:
            return d.put_codes[page.key], 0
        if is_stale:
            return PutCode.STALE_GENERATION, 0
        if place in d.pages:
            return PutCode.EXISTS, 0
        if not verify_payload(
            data,
            page.payload_sum,
            key=page.key,
            fingerprint=bound.fingerprint,
            namespace_generation=bound.generation,
            shard=bound.layout.shard.index,
            codec=Codec(page.codec),
            length=page.length,
        ):
            return PutCode.REFUSED, 0
        d.pages[place] = Stored(
            data, page.codec, page.payload_sum, page.origin_sum, page.lossy, page.parent,
            page.depth, opened.session, opened.ttl_ms, d.next(),
        )  # fmt: skip
        return PutCode.STORED, d.pages[place].generation

    async def get(self, request, context):
        await self._enter("get")
        d = self._d
        bound, is_stale = self._bound(request.handle)
        keys = split(request.keys, d.limits["keys_per_call_max"])
        sent = 0
        for number, key in enumerate(keys):
            if number == d.stall_get_after:
                await asyncio.sleep(3600)
            code = self._code(bound, is_stale, key)
            stored = d.pages.get((bound.number, bound.layout.shard.index, key))
            if code == GetCode.HIT and (
                stored.codec not in (request.accept or [Codec.RAW])
                or (stored.lossy and not request.lossy_ok)
            ):
                code = GetCode.MISS
            if code != GetCode.HIT:
                head = transfer_pb2.GetResponse(pages=[transfer_pb2.GetPage(code=code)])
                yield wire.encode_get(head)
                continue
            data = bytearray(stored.data)
            if d.flip_gets:
                d.flip_gets -= 1
                data[len(data) // 2] ^= 1
            head = transfer_pb2.GetResponse(offset=sent)
            head.pages.add(
                code=code, tier=self._tier(bound, key), codec=stored.codec, lossy=stored.lossy,
                length=len(data), payload_sum=stored.payload_sum, origin_sum=stored.origin_sum,
                slot=stored.generation, generation=stored.generation,
            )  # fmt: skip
            for at in range(0, len(data), d.chunk_bytes):
                chunk = memoryview(data)[at : at + d.chunk_bytes]
                yield wire.encode_get(head, [chunk])
                sent += len(chunk)
                head = transfer_pb2.GetResponse(offset=sent)

    def _code(self, bound, is_stale, key):
        if is_stale:
            return int(GetCode.STALE)
        there = (bound.number, bound.layout.shard.index, key) in self._d.pages
        return int(GetCode.HIT if there else GetCode.MISS)

    async def delete(self, request, context):
        await self._enter("delete")
        bound, is_stale = self._bound(request.handle)
        codes = []
        for key in split(request.keys, self._d.limits["keys_per_call_max"]):
            gone = self._d.pages.pop((bound.number, bound.layout.shard.index, key), None)
            codes.append(
                DeleteCode.STALE
                if is_stale
                else DeleteCode.ABSENT
                if gone is None
                else DeleteCode.DELETED
            )
        return pages_pb2.DeleteResponse(codes=codes)

    async def pin(self, request, context):
        await self._enter("pin")
        bound, is_stale = self._bound(request.handle)
        keys = split(request.keys, self._d.limits["keys_per_call_max"])
        codes = [self._code(bound, is_stale, key) for key in keys]
        lease_id = self._d.next() if GetCode.HIT in codes else 0
        if lease_id:
            self._d.leases[lease_id] = bound.session_id
        ttl_ms = min(
            request.ttl_ms or self._d.limits["lease_ms_default"], self._d.limits["lease_ms_max"]
        )
        return pages_pb2.PinResponse(lease_id=lease_id, codes=codes, ttl_ms=ttl_ms)

    async def renew(self, request, context):
        await self._enter("renew")
        return self._lease_codes(request, LeaseCode.HELD)

    async def unpin(self, request, context):
        await self._enter("unpin")
        answer = self._lease_codes(request, LeaseCode.RELEASED)
        for lease_id in request.lease_ids:
            self._d.leases.pop(lease_id, None)
        return answer

    def _lease_codes(self, request, good):
        if request.session_id not in self._d.sessions:
            raise errors.UnknownHandle("unknown session", remedy=REMEDY)
        held = [self._d.leases.get(i) == request.session_id for i in request.lease_ids]
        return pages_pb2.LeaseResponse(codes=[good if ok else LeaseCode.EXPIRED for ok in held])

    async def bump_generation(self, request, context):
        await self._enter("bump")
        family = self._d.family(request.fingerprint)
        if request.token in family.tokens:
            return pages_pb2.BumpGenerationResponse(generation=family.tokens[request.token])
        if family.generation != request.expected_generation:
            raise errors.GenerationConflict(f"at {family.generation}", remedy=REMEDY)
        generation = self._d.bump(request.fingerprint, request.weights_revision)
        family.tokens[request.token] = generation
        return pages_pb2.BumpGenerationResponse(generation=generation)

    async def delete_namespace(self, request, context):
        await self._enter("delete_namespace")
        number = self._d.family(request.fingerprint).number
        del self._d.families[request.fingerprint]
        gone = [place for place in self._d.pages if place[0] == number]
        for place in gone:
            del self._d.pages[place]
        return pages_pb2.DeleteNamespaceResponse(pages=len(gone))

    async def get_capabilities(self, request, context):
        await self._enter("capabilities")
        return admin_pb2.GetCapabilitiesResponse(
            version="fake",
            record_version=1,
            tiers=[2, 3] if self._d.tiers.has_nvme else [2],
            codecs=[1, 2],
            planes=["grpc"],
            chunk_bytes=self._d.chunk_bytes,
            session_ttl_ms=1000,
            methods=rpc.implemented(rpc.PAGES, self),
            **self._d.limits,
        )

    async def get_status(self, request, context):
        await self._enter("status")
        return admin_pb2.GetStatusResponse(
            version="fake",
            state="ready",
            boot_id=self._d.boot_id,
            uptime_ms=1500,
            tiers=self._d.tiers.status,
            counters={"gets": self._d.calls["get"]},
            devices=self._d.tiers.devices,
            namespaces=[
                admin_pb2.NamespaceStatus(fingerprint=fingerprint, generation=family.generation)
                for fingerprint, family in self._d.families.items()
            ],
        )
