"""The README does what it says: its client blocks run on a real daemon, its picture is true."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.core import lifecycle
from kvtier.testing.daemon_process import DaemonProcess

torch = pytest.importorskip("torch")

PAGES = 5
PAGE_TOKENS = 64


def client_blocks(repo: Path) -> tuple[str, str]:
    """The one that needs the client alone, and the long one."""
    text = (repo / "README.md").read_text(encoding="utf-8")
    small, large = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return small, large


def run_block(repo: Path, url: str, where: Path) -> dict[str, Any]:
    path = where / "block.py"
    path.write_text(client_blocks(repo)[1], encoding="utf-8")
    torch.manual_seed(5)
    return runpy.run_path(str(path), init_globals={"url": url})


def test_the_client_block_runs(repo: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvt-") as home, DaemonProcess(Path(home)) as daemon:
        first = run_block(repo, daemon.url, tmp_path)
        assert first["got"].prefix == 0
        assert [r.reason for r in first["put"]] == [kvtier.PutCode.STORED] * PAGES
        second = run_block(repo, daemon.url, tmp_path)
    got, pages = second["got"], second["pages"]
    assert got.prefix_tokens == PAGES * PAGE_TOKENS
    assert {result.tier for result in got} == {kvtier.Tier.HOST}
    assert torch.equal(second["pool"][[7, 0, 3, 2, 5]], pages)
    assert list(second["put"]) == []
    for view, page in zip(second["views"], pages, strict=True):
        assert torch.equal(torch.stack([view["k"], view["v"]]), page)


def test_the_small_client_block_needs_no_torch(repo: Path) -> None:
    """In a process of its own, where the address that is looked at by default is the daemon's."""
    check = (
        "import sys\n"
        "assert got.prefix == 3 and (found == pages).all()\n"
        "assert 'torch' not in sys.modules\n"
    )
    with tempfile.TemporaryDirectory(prefix="kvt-") as home, DaemonProcess(Path(home)) as daemon:
        default = f"import kvtier.client.aio as aio\naio.default_url = lambda: {daemon.url!r}\n"
        done = subprocess.run(
            [sys.executable, "-c", f"{default}{client_blocks(repo)[0]}{check}"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr


def test_the_picture_is_the_one_in_the_code(repo: Path) -> None:
    text = (repo / "README.md").read_text(encoding="utf-8")
    (picture,) = re.findall(r"```\n(FREE .*?)```", text, re.DOTALL)
    documented = lifecycle.__doc__ or ""
    for word in re.findall(r"[A-Z]{4,}|[a-z]{4,}", picture):
        assert word in documented, word
    assert set(re.findall(r"\b[A-Z]{4,}\b", picture)) == {state.name for state in lifecycle.State}


def test_every_file_the_readme_names_exists(repo: Path) -> None:
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        text = (repo / name).read_text(encoding="utf-8")
        links = re.findall(r"\]\((?!http|#)([^)#]+)", text)
        paths = re.findall(r"`((?:kvtier|core|tests|packing|transfer|daemon)/[\w/.]+)`", text)
        for link in links:
            assert (repo / link).exists(), f"{name}: {link}"
        for path in paths:
            assert (repo / path).exists() or (repo / "kvtier" / path).exists(), f"{name}: {path}"
