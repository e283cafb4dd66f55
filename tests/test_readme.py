"""The README does what it says: its client block runs on a real daemon, its picture is true."""

from __future__ import annotations

import re
import runpy
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvtier
from kvtier.core import lifecycle
from kvtier.testing.daemon_process import DaemonProcess

torch = pytest.importorskip("torch")

PAGES = 5
PAGE_TOKENS = 64
CONFIG = SimpleNamespace(
    _name_or_path="acme/tiny",
    model_type="llama",
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_size=64,
    head_dim=16,
    rope_theta=10000.0,
)


def client_block(repo: Path) -> str:
    text = (repo / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return block


def run_block(repo: Path, url: str, pages: torch.Tensor, where: Path) -> dict[str, object]:
    names: dict[str, object] = {
        "config": CONFIG,
        "rev": "main",
        "url": url,
        "token_ids": list(range(PAGES * PAGE_TOKENS + 3)),
        "pages": pages,
        "pool": torch.zeros((8, *pages.shape[1:]), dtype=pages.dtype),
        "page_ids": [7, 0, 3, 2, 5],
    }
    path = where / "block.py"
    path.write_text(client_block(repo), encoding="utf-8")
    return runpy.run_path(str(path), init_globals=names)


def test_the_client_block_runs(repo: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    shape = (PAGES, 2, 2, PAGE_TOKENS, 2, 16)
    pages = torch.randn(shape, generator=generator).to(torch.bfloat16)
    with tempfile.TemporaryDirectory(prefix="kvt-") as home, DaemonProcess(Path(home)) as daemon:
        first = run_block(repo, daemon.url, pages, tmp_path)
        assert first["got"].prefix == 0
        assert [r.reason for r in first["put"]] == [kvtier.PutCode.STORED] * PAGES
        second = run_block(repo, daemon.url, pages, tmp_path)
    got = second["got"]
    assert got.prefix_tokens == PAGES * PAGE_TOKENS
    assert {result.tier for result in got} == {kvtier.Tier.HOST}
    assert torch.equal(second["pool"][second["page_ids"]], pages)
    assert list(second["put"]) == []
    for view, page in zip(second["views"], pages, strict=True):
        assert torch.equal(torch.stack([view["k"], view["v"]]), page)


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
