"""What is told of what is there: whole blocks, chains, differences; and how it is written."""

from __future__ import annotations

import random

import msgpack
import pytest

from kvtier import Tier
from kvtier.packing.keys import chain_keys, salt_seed
from kvtier_sglang.events.blocks import Blocks, Chain, Chains
from kvtier_sglang.events.mirror import Mirror
from kvtier_sglang.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Medium,
    block_hash,
    encode,
)
from tests.seeds import seeds

HOST, NVME = Tier.HOST, Tier.NVME
SIZE = 4


def keys_of(tokens, parent=None):
    return chain_keys(tokens, SIZE, parent=parent)


def chain(tokens, keys, before=None):
    return Chain(tokens=tokens, hashes=[key.hex() for key in keys], before=before and before.hex())


@pytest.fixture
def blocks():
    return Blocks(SIZE, blocks_max=100)


TOKENS = list(range(12))
KEYS = keys_of(TOKENS)
NAMES = [block_hash(key) for key in KEYS]


def test_blocks_are_believed_that_hash_to_what_they_are_called(blocks):
    assert blocks.learn(chain(TOKENS, KEYS)) == set(NAMES)
    assert [blocks[name].parent for name in NAMES] == [None, *NAMES[:2]]
    assert [blocks[name].depth for name in NAMES] == [0, 1, 2]
    assert list(blocks[NAMES[1]].tokens) == TOKENS[4:8]
    assert blocks.learn(chain(TOKENS, KEYS)) == set()
    more = [7, 8, 9, 10]
    (key,) = keys_of(more, KEYS[2])
    assert blocks.learn(chain(more, [key], KEYS[2])) == {block_hash(key)}


def test_blocks_of_a_salt_and_of_no_known_parent_are_not(blocks):
    salted = chain_keys(TOKENS, SIZE, parent=None, seed=salt_seed(b"a"))
    assert blocks.learn(chain(TOKENS, salted)) == set()
    more = keys_of([1, 2, 3, 4], salted[0])
    assert blocks.learn(chain([1, 2, 3, 4], more, salted[0])) == set()
    assert blocks.learn(chain([1, 2], [], None)) == set()
    assert blocks.learn(chain([(1, 2), (2, 3), (3, 4), (4, 5)], KEYS)) == set()
    wrong = [KEYS[0], KEYS[2]]
    assert blocks.learn(chain(TOKENS, wrong)) == {NAMES[0]}


def test_the_latest_blocks_are_kept():
    blocks = Blocks(SIZE, blocks_max=2)
    assert blocks.learn(chain(TOKENS[:8], KEYS[:2])) == set(NAMES[:2])
    other = [block_hash(key) for key in keys_of([9, 9, 9, 9])]
    blocks.learn(chain(TOKENS[:4], KEYS[:1]))
    assert blocks.learn(chain([9, 9, 9, 9], keys_of([9, 9, 9, 9]))) == {*other, NAMES[1]}
    assert len(blocks) == 2
    assert NAMES[0] in blocks


@pytest.fixture
def mirror(blocks):
    """Of K and V, with the tokens of three blocks known."""
    blocks.learn(chain(TOKENS, KEYS))
    return Mirror(blocks, objects=2)


def told(medium, names, parent=None, tokens=()):
    return BlockStored(
        medium=medium, hashes=tuple(names), parent=parent, tokens=tuple(tokens), block_tokens=SIZE
    )


def test_a_block_is_there_when_all_of_it_is_and_gone_when_a_part_is(mirror):
    mirror.stored(HOST, 0, b"".join(KEYS))
    assert mirror.take() == []
    mirror.stored(HOST, 1, b"".join(KEYS[1:]))
    assert mirror.take() == [told(Medium.EXTERNAL, NAMES[1:], NAMES[0], TOKENS[4:])]
    mirror.stored(HOST, 1, KEYS[0])
    assert mirror.take() == [told(Medium.EXTERNAL, NAMES[:1], None, TOKENS[:4])]
    mirror.removed(HOST, 0, KEYS[2])
    assert mirror.take() == [BlockRemoved(medium=Medium.EXTERNAL, hashes=(NAMES[2],))]
    assert mirror.take() == []


def test_one_tier_says_nothing_of_the_other(mirror):
    for number in (0, 1):
        for tier in (HOST, NVME):
            mirror.stored(tier, number, KEYS[0])
    media = [event.medium for event in mirror.take()]
    assert media == [Medium.EXTERNAL, Medium.DISK]
    mirror.removed(HOST, 0, KEYS[0])
    assert mirror.take() == [BlockRemoved(medium=Medium.EXTERNAL, hashes=(NAMES[0],))]
    assert list(mirror.all())[1:] == [told(Medium.DISK, NAMES[:1], None, TOKENS[:4])]


def test_host_memory_has_the_name_that_it_is_given(blocks):
    blocks.learn(chain(TOKENS, KEYS))
    mirror = Mirror(blocks, objects=1, host=Medium.CPU_PINNED)
    for tier in (HOST, NVME):
        mirror.stored(tier, 0, KEYS[0])
    assert [event.medium for event in mirror.take()] == [Medium.CPU_PINNED, Medium.DISK]
    mirror.is_just(0, {NVME: KEYS[0]})
    assert mirror.take() == [BlockRemoved(medium=Medium.CPU_PINNED, hashes=(NAMES[0],))]


def test_what_came_and_went_between_two_turns_is_not_told(mirror):
    for number in (0, 1):
        mirror.stored(NVME, number, KEYS[0])
    mirror.removed(NVME, 0, KEYS[0])
    assert mirror.take() == []
    assert list(mirror.all()) == [AllBlocksCleared()]


def test_blocks_without_tokens_are_told_once_they_have_some(blocks):
    mirror = Mirror(blocks, objects=1)
    mirror.stored(HOST, 0, b"".join(KEYS))
    assert mirror.take() == []
    mirror.learned(blocks.learn(chain(TOKENS, KEYS)))
    assert mirror.take() == [told(Medium.EXTERNAL, NAMES, None, TOKENS)]


@pytest.mark.parametrize("seed", seeds(5, of=20))
def test_a_snapshot_ends_where_the_lost_events_would_have(seed):
    """One mirror sees every change, one a part of them and then a snapshot; what each has told
    comes to the same, which is what is there.
    """
    rng = random.Random(seed)
    tokens = [rng.randrange(9) for _ in range(40 * SIZE)]
    keys = keys_of(tokens)
    blocks = Blocks(SIZE, blocks_max=100)
    blocks.learn(chain(tokens, keys))
    sees_all, loses = Mirror(blocks, objects=2), Mirror(blocks, objects=2)
    there = {(tier, number): set() for tier in (HOST, NVME) for number in (0, 1)}
    believes = {sees_all: {}, loses: {}}

    def tell(mirror):
        believed = believes[mirror]
        for event in mirror.take():
            names = believed.setdefault(event.medium, set())
            if isinstance(event, BlockRemoved):
                assert names.issuperset(event.hashes)
                names.difference_update(event.hashes)
            else:
                assert names.isdisjoint(event.hashes)
                names.update(event.hashes)

    for _ in range(300):
        place = tier, number = rng.choice(list(there))
        key = rng.choice(keys)
        mirrors = [sees_all] if rng.random() < 0.1 else [sees_all, loses]
        for mirror in mirrors:
            (mirror.removed if key in there[place] else mirror.stored)(tier, number, key)
        there[place] ^= {key}
        if rng.random() < 0.3:
            tell(sees_all)
            tell(loses)
    for number in (0, 1):
        loses.is_just(number, {tier: b"".join(there[tier, number]) for tier in (HOST, NVME)})
    tell(sees_all)
    tell(loses)
    whole = {
        medium: {block_hash(key) for key in there[tier, 0] & there[tier, 1]}
        for tier, medium in ((HOST, Medium.EXTERNAL), (NVME, Medium.DISK))
    }
    assert believes[sees_all] == believes[loses] == whole


def test_chains_are_told_to_who_listens_and_copied():
    chains, tokens = Chains(), list(TOKENS)
    chains.tell(tokens, ["a"], None)
    inbox = chains.listen()
    chains.tell(tokens, None, None)
    chains.tell(tokens, ["a", "b"], "c")
    tokens[0] = 99
    heard = inbox.take()
    assert inbox.take() is None
    assert (list(heard.tokens), heard.hashes, heard.before) == (TOKENS, ("a", "b"), "c")
    chains.leave(inbox)
    chains.tell(tokens, ["a"], None)
    assert inbox.take() is None
    assert not chains.has_listeners


def test_pairs_of_tokens_are_told_to_nobody():
    chains = Chains()
    inbox = chains.listen()
    chains.tell([(1, 2), (2, 3)], ["a"], None)
    chains.tell([1 << 64], ["a"], None)
    assert inbox.take() is None


def test_what_waits_is_bounded_by_its_tokens(monkeypatch):
    monkeypatch.setattr("kvtier_sglang.events.blocks.WAITING_TOKENS_MAX", 10)
    chains = Chains()
    inbox = chains.listen()
    for number in range(4):
        chains.tell([number] * 4, ["a"], None)
    assert [list(inbox.take().tokens) for _ in range(len(inbox))] == [[2] * 4, [3] * 4]
    chains.tell([7] * 11, ["a"], None)
    assert inbox.take() is None


@pytest.mark.parametrize("name", ["zz" * 32, "", "00", "ü"])
def test_a_chain_with_names_that_are_none_is_no_news(blocks, name):
    assert blocks.learn(Chain(tokens=TOKENS, hashes=[name], before=None)) == set()
    assert blocks.learn(Chain(tokens=TOKENS, hashes=[KEYS[0].hex()], before=name)) == set()
    assert blocks.learn(chain(TOKENS, KEYS)) == set(NAMES)


def test_how_a_batch_is_written():
    events = [
        AllBlocksCleared(),
        BlockRemoved(medium=Medium.DISK, hashes=(-5,)),
        told(Medium.EXTERNAL, [1, 2], -3, range(8)),
    ]
    assert msgpack.unpackb(encode(events, stamp=1.5, dp_rank=2)) == [
        1.5,
        [
            {"type": "AllBlocksCleared"},
            {"type": "BlockRemoved", "block_hashes": [-5], "medium": "DISK"},
            {
                "type": "BlockStored",
                "block_hashes": [1, 2],
                "parent_block_hash": -3,
                "token_ids": list(range(8)),
                "block_size": SIZE,
                "lora_id": None,
                "medium": "EXTERNAL",
            },
        ],
        2,
    ]
    assert block_hash(bytes.fromhex("ff" * 7 + "fe" + "00" * 24)) == -2
