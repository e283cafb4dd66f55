"""A real SGLang server on a real daemon: the same text from every tier and after every failure, and
as many tokens from storage as there have to be.

One server for the module, for a start takes half a minute; each test has prompts of its own.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from server_models import other_weights, prompt
from server_rig import PAGE, Server, extra_config, storable
from server_tiers import (
    check_found,
    comes,
    comes_back,
    counters,
    finds_all,
    killed,
    stopped,
    stored,
    stored_on_nvme,
)
from sglang_rig import needs_sglang
from tokenizers import Tokenizer

import kvtier
from kvtier.packing.keys import chain_keys
from tests.faults.fault_rig import flip_bit, newest, records

pytestmark = [needs_sglang, pytest.mark.timeout(1800)]

REQUESTS = 8
#: What a request may take longer with a daemon that does not answer than without storage.
EXTRA_S = 2.5
ATTEMPTS = 3


@pytest.fixture(scope="module")
def server(tiers, model, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(model, log, extra_config(tiers.url)) as running:
        yield running


@pytest.mark.leaks_allowed("the server that is started anew outlives the test")
def test_from_the_device_from_storage_and_from_a_server_that_starts_anew(server):
    text = prompt("Ardan")
    cold = server.generate(text)
    tokens = storable(cold)
    assert cold.found == {}
    assert tokens > 200
    again = server.generate(text)
    assert (again.text, again.found) == (cold.text, {"device": tokens})
    server.flush()
    check_found(server, text, cold, tokens)
    server.close()
    server.start()
    check_found(server, text, cold, tokens)


@pytest.mark.leaks_allowed("the daemon that is started again outlives the test")
def test_from_nvme_after_the_daemon_was_killed(server, tiers):
    text = prompt("Brenn")
    cold = stored_on_nvme(server, tiers, text)
    with killed(tiers):
        assert server.generate(text).text == cold.text
        server.flush()
    before = counters(tiers).get("hit_nvme", 0)
    comes_back(server, "Brenn")
    check_found(server, text, cold, storable(cold))
    # What a client has used by itself is told within a second.
    comes(lambda: counters(tiers)["hit_nvme"] - before == 2 * storable(cold) // PAGE)


@pytest.mark.leaks_allowed("the daemon that is started again outlives the test")
def test_a_flipped_byte_on_nvme_is_computed_again_and_counted(server, tiers, model):
    text = prompt("Corr")
    cold = stored_on_nvme(server, tiers, text)
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    assert len(tokens) == cold.prompt_tokens
    whole = 5
    key = chain_keys(tokens, PAGE, parent=None)[whole]
    with killed(tiers):
        lying = newest(records(tiers.base / "nv")).values()
        found = [record for record in lying if record.header.key == key]
        assert len(found) == 2, "K and V"
        flip_bit(found[1].path, found[1].payload_offset + 100, 3)
    comes_back(server, "Corr")
    before = counters(tiers)
    check_found(server, text, cold, whole * PAGE)
    comes(lambda: counters(tiers)["condemned"] == before.get("condemned", 0) + 1)
    check_found(server, text, cold, storable(cold))


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_pages_of_one_salt_are_not_there_for_another(server, field):
    """Cold for each, and then everybody finds their own; no salt is one of its own, too."""
    text = prompt(f"Hestan {field}")
    salts = [{}, {field: "a"}, {field: "b"}, {field: "a" * 4000}]
    colds = [stored(server, text, **salt) for salt in salts]
    for salt, cold in zip(salts, colds, strict=True):
        check_found(server, text, cold, storable(cold), **salt)


def test_what_was_moved_is_in_the_servers_metrics(server):
    """SGLang's own and those beside them: pages to storage, and the same pages from there."""
    names = (
        "sglang:backuped_tokens_total",
        "sglang:prefetched_tokens_total",
        "sglang:prefetch_bandwidth_count",
        "sglang:backup_bandwidth_count",
        "kvtier:set_pages_total stored",
        "kvtier:get_pages_total hit",
    )
    text = prompt("Iona")
    before = server.metrics()
    cold = stored(server, text)
    check_found(server, text, cold, storable(cold))

    def grown():
        now = server.metrics()
        return {name: now.get(name, 0) - before.get(name, 0) for name in names}

    # The scheduler's loop brings them there.
    comes(lambda: all(grown().values()))
    moved = grown()
    assert moved["sglang:prefetched_tokens_total"] == PAGE * moved["kvtier:get_pages_total hit"]
    assert moved["sglang:prefetched_tokens_total"] >= storable(cold)
    assert moved["sglang:backuped_tokens_total"] >= storable(cold)
    assert moved["kvtier:set_pages_total stored"] >= storable(cold) // PAGE
    assert server.metrics()["kvtier:serving"] == 1


def test_status_names_the_servers_that_are_attached(server, tiers):
    server.generate(prompt("Innis", 2))
    with kvtier.connect(tiers.url, deadline=10) as kv:
        names = [session.client_name for session in kv.status(deadline=10).sessions]
    assert any(re.fullmatch(r"sglang .*smollm2\S* pid \d+", name) for name in names), names


def test_flushing_ends_no_generation_and_clearing_deletes(server, tiers):
    text = prompt("Inver")
    cold = stored(server, text)
    with kvtier.connect(tiers.url, deadline=10) as kv:
        before = kv.status(deadline=10).namespaces
        server.flush()
        assert [item.generation for item in kv.status(deadline=10).namespaces] == [
            item.generation for item in before
        ]
        server.clear_storage()
        assert sum(item.pages for item in kv.status(deadline=10).namespaces) == 0
    check_found(server, text, cold, 0)
    check_found(server, text, cold, storable(cold))


@pytest.mark.parametrize(
    "stopped_s", [0.0, pytest.param(30.0, marks=pytest.mark.soak)], ids=["short", "long"]
)
def test_a_stopped_daemon_costs_requests_little(server, tiers, stopped_s):
    """Eight at once, half of them known to storage, without storage and with a daemon that is
    stopped, for as long as they take or for half a minute of them. All have the same text; the
    slowest of one and of the other are compared, the second slowest, and so on. The machine has
    other things to do: it has to be so in one of three attempts.
    """
    prompts = [prompt(f"Jura {number} {stopped_s}", 4) for number in range(REQUESTS)]
    texts = [stored(server, text).text for text in prompts[::2]]
    late = []
    for _ in range(ATTEMPTS):
        with detached(server):
            without = server.generate_at_once(prompts)
            server.flush()
        with stopped(tiers):
            ends = time.monotonic() + stopped_s
            answers = [server.generate_at_once(prompts)]
            while time.monotonic() < ends:
                server.flush()
                answers.append(server.generate_at_once(prompts))
        server.flush()
        assert [answer.text for answer in without[::2]] == texts
        for some in answers:
            assert [answer.text for answer in some] == [answer.text for answer in without]
        late = [most_late(without, some) for some in answers]
        if max(late) <= EXTRA_S:
            break
    assert max(late) <= EXTRA_S
    comes(lambda: finds_all(server, prompts[0]))


@pytest.mark.leaks_allowed("the daemon that is started again outlives the test")
def test_a_daemon_that_dies_again_and_again_under_load_changes_no_text(server, tiers):
    """Killed and started as often as that goes while eight requests run, half of them of prompts
    that storage has.
    """
    prompts = [prompt(f"Lunga {number}", 4) for number in range(REQUESTS)]
    texts = [stored(server, text).text for text in prompts[::2]]
    with detached(server):
        without = [answer.text for answer in server.generate_at_once(prompts)]
        server.flush()
    assert without[::2] == texts
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate_at_once, prompts)
        while not running.done():
            with killed(tiers):
                pass
        answers = running.result()
    assert [answer.text for answer in answers] == without
    server.flush()
    comes_back(server, "Lunga")


@contextmanager
def detached(server):
    server.detach()
    try:
        yield
    finally:
        server.attach()


def most_late(without, answers):
    """How much later the answers are, of those in the same place when sorted by their times."""
    pairs = zip(sorted(item.seconds for item in without), sorted(item.seconds for item in answers),
                strict=True)  # fmt: skip
    return max(slow - usual for usual, slow in pairs)


def test_no_page_of_other_weights_is_found_after_an_update(server, tiers, model, tmp_path):
    """From disk, one update after the other: with a version, with the same one again, without one,
    and back. After each the text is that of the weights, and nothing comes from storage; what was
    stored then is found until the next.
    """
    text = prompt("Kerr")
    other = other_weights(model, tmp_path / "other")
    old = stored(server, text)
    texts = {model: old.text, other: None}
    updates = [
        (other, {"weight_version": "v2"}),
        (model, {"weight_version": "v2"}),
        (other, {}),
        (model, {}),
        (other, {"weight_version": "v3"}),
        (model, {"weight_version": "default"}),
    ]
    for path, options in updates:
        assert server.update_weights(path, **options)["success"]
        cold = server.generate(text)
        assert cold.found == {}, options
        texts[path] = texts[path] or cold.text
        assert cold.text == texts[path]
        server.flush()
        check_found(server, text, cold, storable(cold))
    assert texts[model] != texts[other]
    with kvtier.connect(tiers.url, deadline=10) as kv:
        named = {item.weights_revision: item for item in kv.status(deadline=10).namespaces}
    assert all(item.pages == 0 for name, item in named.items() if name == "unstated default")
    assert len(named) <= 3, "families of weights long gone are deleted"


def test_without_a_flush_nothing_is_stored_or_found_until_there_is_one(server, model, tmp_path):
    other = other_weights(model, tmp_path / "other")
    text = prompt("Lorn")
    stored(server, text)
    server.generate(text)
    assert server.update_weights(other, weight_version="v8", flush_cache=False)["success"]
    # Its KV on the device is of both weights now.
    assert set(server.generate(text).found) == {"device"}
    assert server.generate(prompt("Lorn too")).found == {}
    server.flush()
    cold = stored(server, text)
    check_found(server, text, cold, storable(cold))
    assert stored(server, prompt("Lorn too")).found == {}
    assert server.update_weights(model, weight_version="v9")["success"]


def test_a_session_of_updates_is_one_and_what_is_computed_in_it_is_not_stored(server):
    """Without a part of it: as if another process had written the weights meanwhile."""
    text, during = prompt("Mull"), prompt("Noss")
    stored(server, text)
    server.begin_weight_update()
    stored(server, text)
    assert stored(server, during).text
    server.end_weight_update()
    for some in (text, during):
        cold = stored(server, some)
        check_found(server, some, cold, storable(cold))
    # With KV of before on the device it waits for a flush.
    server.begin_weight_update()
    cold = server.generate(text)
    assert cold.found == {}
    server.end_weight_update()
    assert set(server.generate(text).found) == {"device"}
    assert server.generate(during).found == {}
    server.flush()
    cold = stored(server, text)
    check_found(server, text, cold, storable(cold))


def test_every_hook_has_found_its_place(server):
    for words in ("not seen", "kvtier: seeing", "Failed to apply hooks", "Failed to load plugin",
                  "Failed to execute general plugin"):  # fmt: skip
        assert words not in server.log


def test_a_name_given_later_is_that_of_the_weights(server, tiers):
    text = prompt("Moray")
    cold = stored(server, text)
    server.update_weight_version("named later")
    check_found(server, text, cold, 0)
    check_found(server, text, cold, storable(cold))
    with kvtier.connect(tiers.url, deadline=10) as kv:
        revisions = {item.weights_revision for item in kv.status(deadline=10).namespaces}
    assert any("named later" in revision for revision in revisions)


@pytest.fixture(scope="module")
def others(server, tiers, model, tmp_path_factory):
    """Servers beside `server`: one like it, and those that differ in one thing. It has been given
    new names for its weights by now, the others start with one.
    """
    server.update_weight_version("shared")
    differences = {"twin": {}, "dtype": {"dtype": "bfloat16"}, "page": {"page_size": "32"}}
    shared = {"weight_version": "shared"}
    logs = tmp_path_factory.mktemp("others")
    with ExitStack() as stack:
        made = {}
        for name, options in differences.items():
            made[name] = Server(model, logs / name, extra_config(tiers.url), **options, **shared)
            stack.callback(made[name].close)
            made[name].begin()
        for other in made.values():
            other.wait_ready()
        yield made


def test_servers_that_agree_find_each_others_pages(server, others):
    mine, theirs = prompt("Dunmor"), prompt("Eilan")
    cold = stored(server, mine)
    check_found(others["twin"], mine, cold, storable(cold))
    cold = stored(others["twin"], theirs)
    check_found(server, theirs, cold, storable(cold))


@pytest.mark.parametrize(("difference", "page"), [("dtype", PAGE), ("page", 2 * PAGE)])
def test_servers_that_differ_never_do(server, others, difference, page):
    mine, theirs = prompt(f"Faran {difference}"), prompt(f"Garve {difference}")
    other = others[difference]
    ours = stored(server, mine)
    cold = stored(other, mine)
    check_found(other, mine, cold, storable(cold, page))
    stored(other, theirs)
    stored(server, theirs)
    check_found(server, mine, ours, storable(ours))
