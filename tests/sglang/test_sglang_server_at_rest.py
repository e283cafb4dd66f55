"""FP8 at rest behind real servers in bf16: who shares, and what it does to greedy text."""

from __future__ import annotations

import sys

import pytest
from server_models import prompt
from server_rig import Server, extra_config, storable
from sglang_rig import needs_sglang
from tokenizers import Tokenizer

import kvtier
from kvtier.core.page import Tier
from tests.forks import daemon_of_its_own

pytestmark = [needs_sglang, pytest.mark.timeout(1800)]

PROMPTS = 4
NEW_TOKENS = 32
SAMPLING = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def servers(forker, model, tmp_path_factory):
    """Two on one daemon that differ in nothing else: with pages as they are, and packed."""
    logs = tmp_path_factory.mktemp("logs")
    with daemon_of_its_own(forker, "host.bytes=256MiB") as daemon:
        made = {
            at_rest: Server(
                model, logs / at_rest, extra_config(daemon.url, kvtier_at_rest=at_rest),
                dtype="bfloat16",
            )
            for at_rest in ("raw", "fp8")
        }  # fmt: skip
        try:
            for server in made.values():
                server.begin()
            for server in made.values():
                server.wait_ready()
            yield made | {"daemon": daemon}
        finally:
            for server in made.values():
                server.close()


def ask(server, text):
    answer = server.generate(text, sampling_params=SAMPLING)
    server.flush()
    return answer


def test_packed_pages_are_found_by_who_packs_and_by_nobody_else(servers):
    mine, theirs = prompt("Tiree"), prompt("Ulva")
    cold = ask(servers["fp8"], mine)
    assert ask(servers["raw"], mine).found == {}
    assert ask(servers["fp8"], mine).found == {"storage": storable(cold)}
    cold = ask(servers["raw"], theirs)
    assert ask(servers["fp8"], theirs).found == {}
    again = ask(servers["raw"], theirs)
    assert again.found == {"storage": storable(cold)}


def test_what_it_does_to_greedy_text_and_to_room(servers, model, capsys):
    """Told, not promised: the share of tokens that are those of the cold run, and the bytes."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    shares, used = {}, {}
    for at_rest in ("raw", "fp8"):
        server = servers[at_rest]
        before = host_bytes(servers["daemon"])
        equal = total = 0
        for number in range(PROMPTS):
            text = prompt(f"Vallay {number}", 8)
            cold = ask(server, text)
            warm = ask(server, text)
            assert warm.found == {"storage": storable(cold)}
            pair = [tokenizer.encode(answer.text).ids for answer in (cold, warm)]
            equal += sum(one == other for one, other in zip(*pair, strict=False))
            total += max(map(len, pair))
        shares[at_rest] = equal / total
        used[at_rest] = host_bytes(servers["daemon"]) - before
    with capsys.disabled():
        sys.stdout.write(f"\nequal greedy tokens, {PROMPTS} prompts: {shares}; bytes: {used}\n")
    assert used["fp8"] < 0.65 * used["raw"]


def host_bytes(daemon):
    with kvtier.connect(daemon.url, deadline=10) as kv:
        return next(
            tier.used_bytes for tier in kv.status(deadline=10).tiers if tier.tier is Tier.HOST
        )
