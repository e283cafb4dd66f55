"""kvtier/v1 is what protoc makes of proto/, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.core import page
from kvtier.v1 import page_pb2


def test_generated_code_is_what_protoc_makes(repo: Path, tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(repo)) for path in repo.glob("proto/kvtier/v1/*.proto"))
    assert protos
    command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", "-I", "proto"]
    command += [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", *protos]
    subprocess.run(command, cwd=repo, check=True, timeout=60)
    made = {path.name: path.read_bytes() for path in (tmp_path / "kvtier/v1").iterdir()}
    kept = {path.name: path.read_bytes() for path in (repo / "kvtier/v1").glob("*_pb2.py*")}
    differing = sorted(name for name in made | kept if made.get(name) != kept.get(name))
    assert differing == [], "run `make proto`, and never edit kvtier/v1 by hand"


def test_generated_code_runs_with_the_oldest_runtime_we_allow(repo: Path) -> None:
    text = (repo / "kvtier/v1/page_pb2.py").read_text(encoding="utf-8")
    assert "# Protobuf Python Version: 6.31." in text, (
        "made by another grpcio-tools than pyproject.toml names: it would shut out older runtimes"
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (page.Tier, page_pb2.Tier, "TIER_"),
        (page.Codec, page_pb2.Codec, "CODEC_"),
        (page.GetCode, page_pb2.GetCode, "GET_CODE_"),
        (page.PutCode, page_pb2.PutCode, "PUT_CODE_"),
        (page.DeleteCode, page_pb2.DeleteCode, "DELETE_CODE_"),
        (page.LeaseCode, page_pb2.LeaseCode, "LEASE_CODE_"),
        (page.Durability, page_pb2.Durability, "DURABILITY_"),
    ],
)
def test_enums_have_the_numbers_of_the_protocol(ours, theirs, prefix) -> None:
    wire = {name.removeprefix(prefix): number for name, number in theirs.items() if number}
    assert {member.name: member.value for member in ours} == wire


@pytest.mark.parametrize("name", ["config", "metrics"])
def test_reference_pages_are_what_the_code_says(repo: Path, name: str) -> None:
    command = [sys.executable, "-m", "kvtier", name, "--markdown"]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    kept = (repo / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert done.stdout == kept, "run `make docs`"
