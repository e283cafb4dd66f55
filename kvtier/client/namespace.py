"""A namespace: lookup, get, put, prefetch, demote, delete, lease and bump for one layout.

Promise: lookup, get, put, prefetch and demote answer one outcome a key, also when the daemon is
absent, stopped or restarted, and within the deadline; they raise for mistakes in the arguments
alone (and ClientClosed, ForkedClient). If the namespace was bumped by someone else, everything is
STALE until the engine, which knows what weights it has loaded, calls `reopen`.

Async methods belong to the connection's event loop. Arguments are looked at in the method's
synchronous part, so that a tensor's stream is that of the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvtier.client import batches, put_batches, tiers
from kvtier.client.arguments import (
    GetArguments,
    GetCall,
    PutArguments,
    PutCall,
    checked_session,
    checked_traceparent,
)
from kvtier.client.binding import Binding
from kvtier.client.generations import bump_family
from kvtier.client.keys import KeyChain, checked_keys, keys_of_hashes, looked_up
from kvtier.client.lease import AsyncLease
from kvtier.client.link import Within
from kvtier.client.results import DeleteResult, GetResult, LookupResult, MoveResult, PutResult
from kvtier.errors import NamespaceMismatch, StaleGeneration
from kvtier.packing.keys import chain_keys, salt_seed
from kvtier.transfer.planes.values import Hints, LookupReply

if TYPE_CHECKING:
    from typing import Unpack

    from typing_extensions import Buffer

__all__ = ["AsyncNamespace"]


class AsyncNamespace(Binding):
    """Made by `connection.namespace()`. `layout`, `tenant` and `salt` say which one it is."""

    def keys(
        self,
        token_ids: Sequence[int] | Any,
        parent: bytes | KeyChain | None = None,
        *,
        depth: int = 0,
    ) -> KeyChain:
        """One key for each full page of `token_ids`; what is left over has none.

        `parent` goes on from an earlier chain: the chain itself, or its last key with `depth`, the
        pages up to and with that key. Keys equal SGLang's page hashes.
        """
        before: bytes | None = None
        if isinstance(parent, KeyChain):
            depth = parent.depth + len(parent)
            before = parent[-1] if len(parent) else parent.parent or None
        elif parent is not None:
            before = checked_keys([parent])[0]
        made = chain_keys(
            token_ids, self.layout.page_tokens, parent=before, seed=salt_seed(self.salt)
        )
        return KeyChain(made, parent=before or b"", depth=depth)

    def keys_from(self, hashes: Iterable[str | Buffer]) -> KeyChain:
        """Keys that an engine has already made: page hashes as hexadecimal text or 32 bytes."""
        return keys_of_hashes(hashes)

    async def lookup(
        self,
        keys: Sequence[bytes],
        *,
        session: str = "",
        traceparent: str = "",
        lossy_ok: bool = True,
        deadline: Within = None,
    ) -> LookupResult:
        """Which pages are there now. Advice: a page can leave before the get.

        With `lossy_ok=False` a page of which the best copy was rounded by a codec is a miss, as it
        is to a get without `lossy_ok`.
        """
        within = self._link.deadline(deadline)
        hints = Hints(
            session=checked_session(session), traceparent=checked_traceparent(traceparent)
        )
        known = looked_up(keys)
        found = self.lookup_here(known, lossy_ok=lossy_ok)
        if found is None:
            found = self.lookup_result(
                await batches.lookup(self, known, hints, within, is_exact=not lossy_ok)
            )
        return found

    def lookup_here(self, keys: Sequence[bytes], *, lossy_ok: bool = True) -> LookupResult | None:
        """What shared memory can answer of a lookup, None where only the daemon can. Any thread."""
        self._link.check_usable()
        found = batches.lookup_here(self, keys, is_exact=not lossy_ok)
        return None if found is None else self.lookup_result(found)

    def lookup_result(self, found: LookupReply) -> LookupResult:
        return LookupResult(found.codes, found.tiers, self.layout.page_tokens)

    async def get(
        self,
        keys: Sequence[bytes],
        *,
        out: object = None,
        at: object = None,
        **options: Unpack[GetArguments],
    ) -> GetResult:
        """Pages into `out`, verified there. Only a HIT's bytes count: the place of any other page
        may hold anything afterwards.

        `out` is a tensor, ndarray or writable buffer with the pages along its first dimension (or
        cut into equal parts), or a sequence with one of those for each page; strided memory and GPU
        tensors are filled in place. With `at=page_ids` the pages go to these rows of a bigger pool
        `out` (`out=pool[page_ids]` would fill a copy where `page_ids` is a list). Without `out` the
        bytes are in `result.pages`.

        `lossy_ok` accepts pages that a codec has rounded (unpacked into `out`); else such a copy is
        a miss. `codec=Codec.FP8` takes no other copies than those and implies `lossy_ok`. The first
        page that is unpacked loads what unpacks it, within the deadline or not: call
        kvtier.packing.fp8.warm_up() beforehand. Raises PageSizeError (also for pages of `out` that
        share memory), KeyLengthError; MissingExtra for `lossy_ok` without numba and torch.
        """
        return await self.send_get(self.prepare_get(keys, out=out, at=at, **options))

    def prepare_get(
        self,
        keys: Sequence[bytes],
        *,
        out: object = None,
        at: object = None,
        **options: Unpack[GetArguments],
    ) -> GetCall:
        """The part of `get` that looks at its arguments, in the caller's thread."""
        within = self._link.deadline(options.get("deadline"))
        self._link.check_usable()
        return GetCall.of(self.layout, keys, out, at, options, deadline=within)

    async def send_get(self, call: GetCall) -> GetResult:
        """All of `get` behind its arguments."""
        return await self.finish_get(call, await batches.begin_get_on_loop(self, call))

    def begin_get(self, call: GetCall) -> batches.BegunGet:
        """The part of `get` that needs no daemon. Any thread."""
        return batches.begin_get(self, call)

    async def finish_get(self, call: GetCall, begun: batches.BegunGet) -> GetResult:
        """The rest of `get`."""
        if begun.left:
            await batches.finish_get(self, call, begun)
        done = batches.got(self, call, begun)
        if call.options.hints.says_return and done.prefix:
            key = call.keys[done.prefix - 1]
            await tiers.expect(self, key, call.options.hints, call.deadline)
        return done

    async def put(
        self,
        keys: Sequence[bytes],
        pages: object,
        *,
        at: object = None,
        **options: Unpack[PutArguments],
    ) -> PutResult:
        """Stores pages; see `get` for what `pages` and `at` may be. Do not write to them meanwhile.

        The keys of one call are a chain unless `chain=False`: each is the parent of the next.
        `parent` and `depth` are what comes before the first (taken from `keys` when it is a
        KeyChain). Once the pages were not used for `ttl` seconds, host memory gives them up first;
        `session` and `priority` are stored, and heeded by no policy yet. Hints for what to keep are
        `session_end=True` (after this call the conversation is over) and `expected_return` (it goes
        on in so many seconds), of get and put, which a daemon with host.policy = "gittins" heeds;
        they cost a call, once the pages are there.
        `durable="nvme"` waits until the pages survive the daemon; `result.durable` is how many do,
        and a page can be stored and not durable (no NVMe tier, no room there, a device that fails).
        `codec=Codec.FP8` packs before sending; a page with numbers that cannot be packed is
        NONFINITE. The first such put loads what packs, see `get`.
        """
        return await self.send_put(self.prepare_put(keys, pages, at=at, **options))

    def prepare_put(
        self,
        keys: Sequence[bytes],
        pages: object,
        *,
        at: object = None,
        **options: Unpack[PutArguments],
    ) -> PutCall:
        """The part of `put` that looks at its arguments, in the caller's thread."""
        within = self._link.deadline(options.get("deadline"))
        self._link.check_usable()
        return PutCall.of(self.layout, keys, pages, at, options, deadline=within)

    async def send_put(self, call: PutCall) -> PutResult:
        """All of `put` behind its arguments."""
        return await self.finish_put(call, await put_batches.begin_put_on_loop(self, call))

    def begin_put(self, call: PutCall) -> put_batches.BegunPut:
        """The part of `put` that goes by shared memory. Any thread."""
        return put_batches.begin_put(self, call)

    async def finish_put(self, call: PutCall, begun: put_batches.BegunPut) -> PutResult:
        """The rest of `put`."""
        if begun.left:
            await put_batches.finish_put(self, call, begun)
        done = put_batches.done_put(call, begun)
        if call.options.hints.says_return and call.keys:
            await tiers.expect(self, call.keys[-1], call.options.hints, call.deadline)
        return done

    async def prefetch(
        self,
        keys: Sequence[bytes],
        *,
        session: str = "",
        traceparent: str = "",
        deadline: Within = None,
    ) -> MoveResult:
        """Starts bringing pages up to host memory, so that a get does not wait for the disk.

        HIT: there already, or on its way. It waits for no disk itself. BUSY: too many pages are on
        their way.
        """
        within = self._link.deadline(deadline)
        self._link.check_usable()
        hints = Hints(
            session=checked_session(session), traceparent=checked_traceparent(traceparent)
        )
        return MoveResult(await tiers.prefetch(self, checked_keys(keys), hints, within))

    async def demote(self, keys: Sequence[bytes], *, deadline: Within = None) -> MoveResult:
        """Starts copying pages down to NVMe; the copies in host memory stay until their room is
        needed.

        HIT: there already, or on its way; it waits for no disk itself (`kv.flush` does). BUSY: too
        many pages are on their way. REFUSED: the daemon has no NVMe tier.
        """
        within = self._link.deadline(deadline)
        self._link.check_usable()
        return MoveResult(await tiers.demote(self, checked_keys(keys), within))

    async def delete(self, keys: Sequence[bytes], *, deadline: Within = None) -> DeleteResult:
        """Removes pages of this shard from every tier, durably. Raises when the daemon does not
        answer.
        """
        within = self._link.deadline(deadline)
        self._link.check_usable()
        return DeleteResult(await batches.delete(self, checked_keys(keys), within))

    def lease(
        self, keys: Sequence[bytes], *, ttl: float = 0.0, deadline: float | None = None
    ) -> AsyncLease:
        """`async with ns.lease(keys) as held`: the pages that are there stay there meanwhile.

        `ttl` in seconds is how long the daemon holds them unless renewed (0: its default).
        """
        self._link.check_usable()
        return AsyncLease(self, checked_keys(keys), ttl=ttl, deadline=deadline)

    async def bump(
        self,
        weights_revision: str = "",
        *,
        expected: int | None = None,
        token: bytes | None = None,
        deadline: Within = None,
    ) -> int:
        """Makes every page of this namespace a miss, in all tiers, durably; the new generation.

        `expected` is the generation to end: by default the one of this object's handle, or where
        the daemon gives none (the namespace was bumped), the present one. A repeated `token` (16
        bytes) answers as the first time. Afterwards this object is STALE until `reopen`, like every
        other. Raises GenerationConflict, UnknownNamespace, and when the daemon does not answer.

        The weights revision of the layout is part of what a family is. So after `bump("r2")` this
        family, that of the layout with "r1", refuses whoever opens it with "r1", and
        `reopen("r2")` opens another family, that of the layout with "r2". To go back, bump this
        family to "r1" again: that needs no handle.
        """
        within = self._link.deadline(deadline)
        self._link.check_usable()
        if expected is None:
            # Refused a handle, the present generation is looked up.
            with suppress(NamespaceMismatch, StaleGeneration):
                expected = (await self._attached(within)).generation
        generation = await bump_family(
            self._link,
            self.fingerprint,
            weights_revision=weights_revision,
            expected=expected,
            token=token,
            deadline=within,
        )
        if generation != self._generation:
            self._end()
        return generation

    async def reopen(self, weights_revision: str | None = None, *, deadline: Within = None) -> int:
        """Binds this object to the namespace's present generation, which it returns.

        Call it after a bump, with the revision of the weights that the engine has loaded now. As
        the revision is part of the family, another one makes this object that of another family;
        `fingerprint` changes with it. Raises NamespaceMismatch when the namespace is for other
        weights (load those, or `bump` it to yours), and when the daemon does not answer.
        """
        within = self._link.deadline(deadline)
        self._link.check_usable()
        self._release(weights_revision)
        return (await self._attached(within)).generation
