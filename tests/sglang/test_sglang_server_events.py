"""KV events of a real server: what kvtier tells beside what SGLang tells itself, in one format."""

from __future__ import annotations

import json
import subprocess
import tempfile

import pytest
from event_rig import HOST, NVME, free_endpoints
from event_router import Router
from server_models import prompt
from server_rig import PAGE, Server, extra_config, storable
from sglang_rig import needs_sglang

from kvtier_sglang.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Medium, encode
from tests.sglang.environment import ENVIRONMENT

pytestmark = [needs_sglang, pytest.mark.timeout(1800)]

#: Decodes batches of standard input, one a line in hexadecimal, with SGLang's own classes.
DECODER = """
import json, sys, msgspec
from sglang.srt.disaggregation.kv_events import KVEventBatch
decoder = msgspec.msgpack.Decoder(KVEventBatch)
for line in sys.stdin:
    batch = decoder.decode(bytes.fromhex(line))
    events = [(type(event).__name__, msgspec.to_builtins(event)) for event in batch.events]
    print("decoded", json.dumps([batch.ts, events, batch.attn_dp_rank]))
"""


@pytest.fixture(scope="module")
def server(tiers, model, tmp_path_factory):
    """With `mine` and `theirs`, where kvtier's events are and SGLang's."""
    mine, theirs = free_endpoints(), free_endpoints()
    extra = extra_config(
        tiers.url,
        kvtier_events_endpoint=mine.events,
        kvtier_events_replay_endpoint=mine.replay,
    )
    own = {
        "publisher": "zmq",
        "endpoint": theirs.events,
        "replay_endpoint": theirs.replay,
        "bind": True,
    }
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(model, log, extra, kv_events_config=json.dumps(own)) as running:
        running.mine, running.theirs = mine, theirs
        yield running


@pytest.fixture
def routers(server):
    made = [Router(of.events, of.replay) for of in (server.mine, server.theirs)]
    yield made
    for router in made:
        router.close()


def test_blocks_of_storage_are_those_that_sglang_tells_itself(server, routers):
    """Same hashes, parents and tokens; and they stay when the server has dropped its own."""
    kvtier, sglang = routers
    cold = server.generate(prompt("Orsay"))
    pages = storable(cold) // PAGE
    kvtier.listen(until=lambda: len(kvtier.believed[HOST]) >= pages)
    kvtier.listen(until=lambda: len(kvtier.believed[NVME]) >= pages)
    sglang.listen(until=lambda: set(kvtier.blocks) <= set(sglang.blocks))
    assert all(sglang.blocks[name] == block for name, block in kvtier.blocks.items())
    server.flush()
    sglang.listen(until=lambda: not sglang.believed["GPU"])
    assert server.generate(prompt("Orsay")).found == {"storage": storable(cold)}
    assert len(kvtier.believed[HOST]) >= pages


def test_what_is_cleared_is_told(server, routers):
    kvtier, _ = routers
    cold = server.generate(prompt("Papa"))
    kvtier.listen(until=lambda: len(kvtier.believed[HOST]) >= storable(cold) // PAGE)
    server.flush()
    server.clear_storage()
    kvtier.listen(until=lambda: not kvtier.believed[HOST] and not kvtier.believed[NVME])


def test_prompts_with_a_salt_are_told_to_nobody(server, routers):
    """The same tokens with a salt and without: they are told once, by the hashes without."""
    kvtier, _ = routers
    salted = server.generate(prompt("Rona"), cache_salt="mine")
    server.flush()
    again = server.generate(prompt("Rona"), cache_salt="mine")
    assert again.found == {"storage": storable(salted)}
    kvtier.listen(until=lambda: True)  # all that holds now
    before = len(kvtier.blocks)
    plain = server.generate(prompt("Rona"))
    kvtier.listen(until=lambda: len(kvtier.blocks) >= before + storable(plain) // PAGE)
    heads = [tokens for parent, tokens in kvtier.blocks.values() if parent is None]
    assert len(heads) == len(set(heads))


def test_sglang_reads_what_is_written():
    """With its own classes, field by field."""
    stored = BlockStored(
        medium=Medium.DISK, hashes=(5, -(2**63)), parent=-1, tokens=(0, 2**40, 7, 8), block_tokens=2
    )
    head = BlockStored(
        medium=Medium.EXTERNAL, hashes=(1,), parent=None, tokens=(3, 4), block_tokens=2
    )
    removed = BlockRemoved(medium=Medium.EXTERNAL, hashes=(2**63 - 1,))
    batches = [
        encode([AllBlocksCleared(), stored, head, removed], stamp=12.5, dp_rank=3),
        encode([], stamp=13.0, dp_rank=0),
    ]
    done = subprocess.run(
        [str(ENVIRONMENT / "bin" / "python"), "-c", DECODER],
        input="\n".join(batch.hex() for batch in batches) + "\n",
        capture_output=True, text=True, timeout=300, check=True,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "HOME": tempfile.gettempdir()},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("decoded ")]
    full, empty = (json.loads(line.removeprefix("decoded ")) for line in lines)
    assert empty == [13.0, [], 0]
    stamp, events, rank = full
    assert (stamp, rank) == (12.5, 3)
    assert [kind for kind, _ in events] == [
        "AllBlocksCleared", "BlockStored", "BlockStored", "BlockRemoved",
    ]  # fmt: skip
    fields = [
        {name: value for name, value in event.items() if name != "type" and value is not None}
        for _, event in events
    ]
    assert fields == [
        {},
        {
            "block_hashes": [5, -(2**63)], "parent_block_hash": -1, "token_ids": [0, 2**40, 7, 8],
            "block_size": 2, "medium": "DISK",
        },
        {"block_hashes": [1], "token_ids": [3, 4], "block_size": 2, "medium": "EXTERNAL"},
        {"block_hashes": [2**63 - 1], "medium": "EXTERNAL"},
    ]  # fmt: skip
