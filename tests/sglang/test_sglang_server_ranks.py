"""A real server of two tensor parallel ranks, each with half of the heads, on one daemon: both see
the same prefixes, and a page of which one rank's part is damaged is a miss for both.
"""

from __future__ import annotations

import re

import pytest
from server_divided import divisible_model
from server_models import prompt
from server_rig import PAGE, Server, extra_config, storable
from server_tiers import (
    check_found,
    comes,
    comes_back,
    counters,
    killed,
    stopped,
    stored,
    stored_on_nvme,
)
from sglang_rig import needs_sglang
from tokenizers import Tokenizer

import kvtier
from kvtier.packing.keys import chain_keys
from tests.faults.fault_rig import flip_bit, records

pytestmark = [needs_sglang, pytest.mark.timeout(1800)]

RANKS = 2


@pytest.fixture(scope="module")
def divided(model, tmp_path_factory):
    return divisible_model(model, tmp_path_factory.mktemp("divided"))


@pytest.fixture(scope="module")
def server(tiers, divided, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(divided, log, extra_config(tiers.url), tp_size=str(RANKS)) as running:
        yield running


def test_what_both_have_stored_both_find(server, tiers):
    text = prompt("Skye")
    cold = server.generate(text)
    tokens = storable(cold)
    again = server.generate(text)
    assert (again.text, again.found) == (cold.text, {"device": tokens})
    server.flush()
    check_found(server, text, cold, tokens)
    with kvtier.connect(tiers.url, deadline=10) as kv:
        status = kv.status(deadline=10)
    ranks = [re.search(r" tp (\d)/2 pid \d+$", item.client_name) for item in status.sessions]
    assert sorted(found.group(1) for found in ranks if found) == ["0", "1"]
    assert {item.shard_count for item in status.namespaces} == {RANKS}


@pytest.mark.leaks_allowed("the daemon that is started again outlives the test")
def test_a_damaged_part_of_one_rank_is_a_miss_for_both(server, tiers, divided):
    """On NVMe, after the daemon was killed. The text is the same."""
    text = prompt("Taransay")
    cold = stored_on_nvme(server, tiers, text, ranks=RANKS)
    tokens = Tokenizer.from_file(str(divided / "tokenizer.json")).encode(text).ids
    assert len(tokens) == cold.prompt_tokens
    whole = 5
    key = chain_keys(tokens, PAGE, parent=None)[whole]
    with killed(tiers):
        assert server.generate(text).text == cold.text
        server.flush()
        lying = [found for found in records(tiers.base / "nv") if found.header.key == key]
        assert sorted(found.header.shard for found in lying) == [0, 0, 1, 1], "K and V of each"
        # One of them: the other would be found only when this is whole again.
        mine = next(found for found in lying if found.header.shard == 1)
        flip_bit(mine.path, mine.payload_offset + 100, 3)
    comes_back(server, "Taransay")
    before = counters(tiers).get("condemned", 0)
    check_found(server, text, cold, whole * PAGE)
    comes(lambda: counters(tiers).get("condemned", 0) > before)
    check_found(server, text, cold, storable(cold))


def test_a_stopped_daemon_changes_no_text(server, tiers):
    """Neither rank waits for ever, and neither for the other."""
    text, new = prompt("Uist"), prompt("Vatersay")
    cold = stored(server, text)
    with stopped(tiers):
        assert server.generate(text).text == cold.text
        server.flush()
        during = server.generate(new)
        server.flush()
    comes_back(server, "Vatersay")
    again = server.generate(new)
    assert again.text == during.text
    server.flush()


def test_ranks_of_which_each_misses_at_random_agree(server, tiers, divided, tmp_path):
    """With SGLang's own injector before the storage of each rank: a fifth of the calls fail, and
    each comes late, differently on both.
    """
    unlucky = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
    }
    texts = [prompt(f"Yell {number}", 4) for number in range(4)]
    colds = [stored(server, text) for text in texts]
    extra = extra_config(tiers.url)
    found = []
    with Server(divided, tmp_path / "log", extra, tp_size=str(RANKS), environment=unlucky) as other:
        assert "storage test injector enabled" in other.log
        for _ in range(5):
            for text, cold in zip(texts, colds, strict=True):
                answer = other.generate(text)
                assert answer.text == cold.text
                found.append(answer.found.get("storage", 0))
                other.flush()
    assert any(found)
    assert min(found) < storable(colds[0])


def test_an_update_of_the_weights_is_one_for_both(server, tiers, model, divided, tmp_path):
    text = prompt("Wiay")
    old = stored(server, text)
    other = divisible_model(model, tmp_path / "other", seed=1)
    assert server.update_weights(other, weight_version="v2")["success"]
    cold = stored(server, text)
    assert cold.text != old.text
    check_found(server, text, cold, storable(cold))
    with kvtier.connect(tiers.url, deadline=10) as kv:
        named = kv.status(deadline=10).namespaces
    (revision,) = {item.weights_revision for item in named if item.pages}
    assert "v2" in revision, "both took the version"
    assert server.update_weights(divided, weight_version="v3")["success"]
    back = stored(server, text)
    assert back.text == old.text
    check_found(server, text, back, storable(back))
