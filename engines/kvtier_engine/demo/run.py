"""The demo from end to end: model, daemon, one chat over four engines, two crashes, report."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import kvtier
from kvtier_engine.demo import report
from kvtier_engine.demo.damage import flip_stored_byte
from kvtier_engine.demo.job import Job, ask
from kvtier_engine.demo.service import running_daemon
from kvtier_engine.smollm2 import ensure_model

__all__ = ["run"]


def run(*, model_dir: Path | None, tokens: int, as_json: bool) -> int:
    """Prints the report; 0 when every claim holds, else 1."""
    started = time.monotonic()
    _note("model: SmolLM2-135M-Instruct (converted once, then kept)")
    model = ensure_model(model_dir)
    _note("compiled code: loaded (the first time on a machine it is compiled)")
    kvtier.warm_up()
    with running_daemon() as daemon:
        job = Job(
            url=daemon.url, daemon_pid=daemon.pid, model_dir=str(model.directory), tokens=tokens
        )
        _note("engine A: computes the first turn, goes on from its own pages, stores them, ends")
        begun = ask("begin", job)
        _note("engine B, another process: goes on from host memory; damaged and fp8 pages")
        job = replace(job, messages=begun["messages"])
        went_on = ask("go_on", job)
        _note("daemon: SIGKILL, and started again; engine C goes on from NVMe")
        daemon.kill()
        daemon.start()
        job = replace(job, messages=went_on["messages"])
        revived = ask("revive", job)
        _note("daemon: SIGKILL, one byte of a segment file flipped, started again; engine D")
        daemon.kill()
        victim = len(revived["keys"]) // 2
        flip_stored_byte(
            daemon.nvme_directory,
            bytes.fromhex(revived["keys"][victim]),
            at=went_on["fp8"]["raw_page_bytes"] // 2,
        )
        daemon.start()
        flipped = ask("revive", job) | {"page": victim}
    results = report.Results(begun=begun, went_on=went_on, revived=revived, flipped=flipped)
    found = report.claims(results)
    seconds = time.monotonic() - started
    if as_json:
        print(json.dumps(report.as_json(results, found, seconds), indent=1))
    else:
        print(report.as_text(results, found, seconds))
    return 0 if all(claim.holds for claim in found) else 1


def _note(text: str) -> None:
    """Progress goes to standard error, so that --json stays one object."""
    print(text, file=sys.stderr, flush=True)
