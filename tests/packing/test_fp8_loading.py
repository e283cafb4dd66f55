"""How the compiled fp8 codec is loaded: from a cache or not, and what happens without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import hashlib, json, logging, sys
{before}
import numpy as np
from kvtier.errors import MissingExtra
from kvtier.packing import fp8
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment

class Said(logging.Handler):
    def emit(self, record):
        said.append({{"event": record.getMessage(), "level": record.levelname, **vars(record)}})

said = []
logging.getLogger().addHandler(Said())
segment = Segment(name="k", role=Role.KEY, dtype="bfloat16", layers=2, heads=2, dim=40,
                  scale_rule=ScaleRule.LAYER_HEAD)
page = Layout.from_segments([segment], model_id="m", revision="r", page_tokens=4, kv_compute="bf16")
raw = np.random.default_rng(1).integers(0, 0x4000, page.raw_bytes // 2, np.uint16).tobytes()
try:
    payload = fp8.pack(page, raw)
    digest = hashlib.sha256(payload.tobytes() + fp8.unpack(page, payload).tobytes()).hexdigest()
    found = {{"backend": fp8.warm_up().value, "digest": digest}}
except MissingExtra as error:
    found = {{"missing": str(error), "remedy": error.remedy}}
found["said"] = [[entry["event"], entry["level"], entry.get("instead")] for entry in said]
found["loaded"] = sorted({{"numba", "torch"}} & {{k for k, v in sys.modules.items() if v}})
if "kvtier.packing.fp8_kernels" in sys.modules:
    from kvtier.packing.fp8_kernels import pack_span
    found["hits"] = sum(pack_span.stats.cache_hits.values())
print(json.dumps(found))
"""
FALLBACK = ["fp8.fallback", "WARNING", "torch"]


def start(before: str = "", **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT.format(before=before)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, **options)


def result(process: subprocess.Popen[str]) -> dict:
    out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    found: dict = json.loads(out)
    return found


def without(*modules: str) -> dict:
    return result(start("; ".join(f"sys.modules[{name!r}] = None" for name in modules)))


def test_numba_alone_is_enough():
    found = without("torch")
    assert (found["backend"], found["said"], found["loaded"]) == ("numba", [], ["numba"])


def test_without_numba_torch_gives_the_same_bytes_and_one_warning():
    found, compiled = without("numba"), without()
    assert found["digest"] == compiled["digest"]
    assert (found["backend"], found["said"], found["loaded"]) == ("torch", [FALLBACK], ["torch"])
    assert (compiled["backend"], compiled["said"]) == ("numba", [])
    assert "torch" not in compiled["loaded"]


def test_a_numba_that_is_broken_is_one_that_is_not_there():
    """As one for another numpy is: its import fails."""
    found = without("numba.core")
    assert (found["backend"], found["said"]) == ("torch", [FALLBACK])


def test_without_both():
    found = without("numba", "torch")
    assert found["missing"] == "packing and unpacking fp8 pages needs numba or torch"
    assert "kvtier[fast]" in found["remedy"]
    assert found["said"] == []


@pytest.fixture
def install(repo: Path, tmp_path: Path) -> Path:
    """A copy of the package whose folder takes no cache (permissions do not stop root)."""
    shutil.copytree(
        repo / "kvtier",
        tmp_path / "site" / "kvtier",
        ignore=shutil.ignore_patterns("__pycache__", "daemon", "cli", "testing"),
    )
    (tmp_path / "site" / "kvtier" / "packing" / "__pycache__").touch()
    return tmp_path / "site"


def begin(install: Path, home: Path) -> subprocess.Popen[str]:
    """Numba's cache can lie in this home alone."""
    environment = dict(os.environ)
    environment.pop("NUMBA_CACHE_DIR", None)
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    environment |= {"PYTHONPATH": str(install), "PYTHONDONTWRITEBYTECODE": "1"}
    # Less optimised code is sooner compiled.
    return start(cwd=install, env={**environment, "NUMBA_OPT": "0"})


@pytest.mark.soak
def test_where_no_folder_takes_a_cache(install, tmp_path):
    nowhere = tmp_path / "file"
    nowhere.touch()
    found = result(begin(install, nowhere / "home"))
    assert (found["backend"], found["said"], found["hits"]) == ("numba", [], 0)
    assert found["digest"] == without()["digest"]


@pytest.mark.soak
def test_two_processes_fill_the_users_cache_at_once(install, tmp_path):
    home = tmp_path / "home"
    results = [result(process) for process in [begin(install, home), begin(install, home)]]
    after = result(begin(install, home))
    assert [found["backend"] for found in (*results, after)] == ["numba"] * 3
    assert len({found["digest"] for found in (*results, after)}) == 1
    assert after["hits"] == 3
    # Whatever a power cut has left of it, the code is compiled again.
    for index in home.rglob("*.nbi"):
        index.write_bytes(bytes(index.stat().st_size))
    torn = result(begin(install, home))
    assert (torn["backend"], torn["said"], torn["hits"]) == ("numba", [], 0)
    assert torn["digest"] == after["digest"]
    mended = result(begin(install, home))
    assert (mended["digest"], mended["hits"]) == (after["digest"], 3)
