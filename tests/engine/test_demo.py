"""`kvtier demo`: end to end on a tiny model, and what it says when a claim does not hold."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvtier.errors import MissingExtra
from kvtier_engine import errors, smollm2
from kvtier_engine.demo import command, report
from kvtier_engine.demo.damage import flip_payload_byte, flip_stored_byte
from kvtier_engine.demo.job import Job, ask
from kvtier_engine.demo.talk import findable
from kvtier_engine.errors import DemoFailed
from tests.engine.tiny_gguf import gguf_of, tiny_model

JOB = Job(url="unix:///nowhere", daemon_pid=0, model_dir="missing", tokens=4)

#: How many there are.
CLAIMS = 10


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The --json output of a whole run with a model of two layers."""
    home = tmp_path_factory.mktemp("demo")
    made = home / "model"
    made.mkdir()
    smollm2.convert(gguf_of(tiny_model(), home / "tiny.gguf"), made)
    arguments = ["demo", "--model-dir", str(made), "--tokens", "6", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "kvtier", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def sample() -> dict:
    """Such an output of another day."""
    return json.loads((Path(__file__).parent / "demo_outcome.json").read_text())


@pytest.mark.soak  # `make demo` does the same with the real model
@pytest.mark.timeout(150)
def test_every_claim_holds(outcome: dict, sample: dict) -> None:
    assert outcome.keys() == sample.keys()
    for part in fields(report.Results):
        assert outcome[part.name].keys() == sample[part.name].keys()
    assert {claim["text"]: claim["holds"] for claim in outcome["claims"]} == {
        claim["text"]: True for claim in outcome["claims"]
    }
    assert len(outcome["claims"]) == CLAIMS
    assert outcome["ok"] is True


@pytest.mark.soak
@pytest.mark.parametrize(("process", "tier"), [("went_on", "host"), ("flipped", "nvme")])
def test_only_the_damaged_page_is_lost(outcome: dict, process: str, tier: str) -> None:
    turn = outcome[process]
    turn = turn.get("damaged", turn)
    assert turn["loads"]["corrupt"] == 1
    assert turn["loads"]["hit"] == turn["cached"][tier] // 64 == turn["expected_tokens"] // 64 - 1


@pytest.mark.parametrize(
    ("path", "value", "claim"),
    [
        ("begun.device.cached.host", 64, "own device pages"),
        ("begun.device.numbers_same_bits", False, "own device pages"),
        ("begun.pages_stored", 1, "full page of its prompt was stored"),
        ("went_on.host.cached.host", 64, "from host memory"),
        ("went_on.host.cached.nvme", 64, "from host memory"),
        ("went_on.host.tokens_same", 3, "bit for bit"),
        ("went_on.host.numbers_same_bits", False, "bit for bit"),
        ("went_on.damaged.loads.corrupt", 0, "flipped in memory"),
        ("went_on.damaged.numbers_same_bits", False, "flipped in memory"),
        ("went_on.damaged.host_after_storing_it_again", 0, "stored again"),
        ("went_on.fp8.page_bytes", 10**12, "half the bytes"),
        ("went_on.fp8.hits", 1, "half the bytes"),
        ("went_on.fp8.hits_without_lossy_ok", 1, "half the bytes"),
        ("went_on.fp8.durable", 0, "durable"),
        ("revived.cached.nvme", 0, "SIGKILL"),
        ("revived.numbers_same_bits", False, "SIGKILL"),
        ("flipped.loads.corrupt", 2, "flipped on disk"),
        ("flipped.tokens_same", 3, "flipped on disk"),
    ],
)
def test_a_claim_that_does_not_hold_is_said(
    sample: dict, path: str, value: object, claim: str
) -> None:
    place = sample
    *names, last = path.split(".")
    for name in names:
        place = place[name]
    assert place[last] != value
    place[last] = value
    results = results_of(sample)
    found = report.claims(results)
    assert [claim in item.text for item in found if not item.holds] == [True]
    text = report.as_text(results, found, 1.0)
    assert f"{CLAIMS - 1} of {CLAIMS} claims hold" in text
    assert text.count("FAIL") == 1


def test_a_slow_run_is_shown_and_fails_no_claim(sample: dict) -> None:
    """One time against one: noise alone may turn it round."""
    for turn in ("device", "host", "damaged"):
        part = sample["begun" if turn == "device" else "went_on"][turn]
        part["first_token_seconds"] = 1234.0
    results = results_of(sample)
    found = report.claims(results)
    assert all(claim.holds for claim in found)
    assert report.as_text(results, found, 1.0).count("1234.00 s") == 3


def test_the_report_is_readable(sample: dict) -> None:
    results = results_of(sample)
    text = report.as_text(results, report.claims(results), 1.0)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert f"{CLAIMS} of {CLAIMS} claims hold" in text
    assert [line[0] for line in text.splitlines() if " ms" in line] == [*"AABBCD"]


def results_of(outcome: dict) -> report.Results:
    return report.Results(**{part.name: outcome[part.name] for part in fields(report.Results)})


@pytest.mark.parametrize(
    ("stored", "prompt", "tokens"),
    [
        (200, 300, 192),
        (192, 300, 192),
        (200, 192, 128),
        (0, 300, 0),
    ],
)
def test_what_can_be_found_is_whole_pages_without_the_last_token(
    stored: int, prompt: int, tokens: int
) -> None:
    assert findable(range(stored), range(prompt)) == tokens
    changed = [*range(130), -1, *range(131, 300)]
    assert findable(range(200), changed) == 128


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser()
    command.register(top.add_subparsers())
    return top


def test_arguments_have_defaults() -> None:
    args = parser().parse_args(["demo"])
    assert (args.model_dir, args.tokens, args.json, args.run) == (None, 32, False, command.run)


@pytest.mark.parametrize("tokens", ["0", "513", "-1", "many"])
def test_a_token_count_out_of_range_is_refused(
    tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["demo", "--tokens", tokens])
    assert "--tokens" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(MissingExtra, match=r"needs gguf$") as raised:
        command.run(parser().parse_args(["demo"]))
    assert raised.value.remedy == "pip install 'kvtier[engine]'"


def test_a_process_that_fails_is_quoted() -> None:
    with pytest.raises(
        DemoFailed,
        match=r"process ended with 1:\nModelUnusable: missing/config.json cannot be read",
    ):
        ask("begin", JOB)


def test_a_flip_changes_one_byte_of_one_record(tmp_path: Path) -> None:
    arena = os.memfd_create("kvtier-arena")
    try:
        before = os.urandom(5 * 4096)
        os.write(arena, before)
        flip_payload_byte(os.getpid(), 2, at=70)
        after = os.pread(arena, len(before), 0)
    finally:
        os.close(arena)
    changed = [i for i in range(len(before)) if before[i] != after[i]]
    assert changed == [3 * 4096 + 70]
    assert after[changed[0]] == before[changed[0]] ^ 0xFF


def test_a_flip_on_disk_changes_one_byte_of_the_page_alone(tmp_path: Path) -> None:
    key = bytes(range(32))
    header = (b"\x89KVTREC\n" + bytes(40) + key).ljust(4096, b"\0")
    other = (b"\x89KVTREC\n" + bytes(40) + bytes(32)).ljust(4096, b"\0")
    before = bytes(4096) + other + bytes(4096) + header + bytes(4096) + bytes(4096)
    segment = tmp_path / "segment-00000000"
    segment.write_bytes(before)
    flip_stored_byte(tmp_path, key, at=70)
    after = segment.read_bytes()
    assert [i for i in range(len(before)) if before[i] != after[i]] == [4 * 4096 + 70]
    with pytest.raises(DemoFailed, match="holds the page"):
        flip_stored_byte(tmp_path, bytes(31) + b"x", at=0)


def test_a_process_without_an_arena_cannot_be_damaged() -> None:
    with pytest.raises(DemoFailed, match="no open file"):
        flip_payload_byte(os.getpid(), 0, at=0)
