"""How many handles a connection remembers."""

from __future__ import annotations

import asyncio
import dataclasses

import kvtier


def test_families_that_were_left_are_forgotten(daemon, layout):
    """An engine whose weights change all day opens another family each time."""

    async def main():
        async with kvtier.aio.connect(daemon.url, deadline=5.0) as kv:
            names = [f"r{number}" for number in range(300)]
            for name in names:
                other = await kv.namespace(dataclasses.replace(layout, weights_revision=name))
                # In use all the time, so never the one that is forgotten.
                ns = await kv.namespace(layout)
            assert len(ns.link._handles) == 256
            daemon.calls.clear()
            assert (await kv.namespace(layout)).generation == 1
            assert (await kv.namespace(other.layout)).generation == 1
            assert daemon.calls["open"] == 0
            first = await kv.namespace(dataclasses.replace(layout, weights_revision=names[0]))
            assert daemon.calls["open"] == 1
            assert (await first.lookup(first.keys(range(4)))).reasons == [kvtier.GetCode.MISS]

    asyncio.run(main())
