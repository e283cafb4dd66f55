"""What a user installs: one wheel with every package, light to import, typed, with its commands."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from kvtier._version import __version__


@pytest.fixture(scope="module")
def wheel(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that no build folder appears in the source tree."""
    source = tmp_path_factory.mktemp("source")
    names = ["pyproject.toml", "README.md", "LICENSE", "kvtier", "bindings", "engines"]
    present = [name for name in names if (repo / name).exists()]
    subprocess.run(["cp", "-r", *present, str(source)], cwd=repo, check=True)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "-w", str(out), str(source)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    (made,) = out.iterdir()
    return made


def test_one_wheel_holds_every_package_and_nothing_else(wheel: Path, repo: Path) -> None:
    assert wheel.name == f"kvtier-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packages = {name.split("/")[0] for name in names if ".dist-info" not in name}
    shipped = {"kvtier", "kvtier_engine", "kvtier_sglang"}
    assert shipped <= packages <= shipped | {"kvtier_vllm"}
    assert {f"{package}/py.typed" for package in shipped} <= names
    modules = {str(path.relative_to(repo)) for path in (repo / "kvtier").rglob("*.py")}
    assert modules - names == set()


def test_metadata_names_the_commands_and_the_licence(wheel: Path) -> None:
    info = f"kvtier-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
    assert "kvtier = kvtier.cli:main" in points
    commands = points.partition("[kvtier.commands]\n")[2].partition("\n\n")[0].splitlines()
    assert [line.partition(" = ")[0] for line in commands] == ["chat", "demo", "engine"]
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "Apache License" in licence


def test_base_dependencies_are_small(repo: Path) -> None:
    with (repo / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    heavy = ("torch", "transformers", "numba", "mooncake", "ucxx")
    assert [name for name in project["dependencies"] if name.startswith(heavy)] == []


def test_what_packs_fp8_at_speed_is_in_every_install_that_needs_it(repo: Path) -> None:
    with (repo / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert [name for name in extras["fast"] if name.startswith("numba>=")] == extras["fast"]
    assert "kvtier[daemon,fast]" in extras["engine"]
    assert "kvtier[fast]" in extras["dev"]


#: What no import of kvtier may bring with it.
HEAVY = {"torch", "transformers", "numba", "llvmlite", "triton"}


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `statement`."""
    code = (
        f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    return set(done.stdout.split())


def test_what_has_its_private_parts_used_is_bounded_above(repo: Path) -> None:
    """The server is built on uvicorn's connection, and reads the states of h11."""
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["engine"]
    for name in ("h11", "starlette", "uvicorn"):
        (asked,) = (one for one in extra if one.startswith(name))
        assert re.fullmatch(rf"{name}>=[\d.]+,<[\d.]+", asked)


def test_importing_kvtier_loads_no_framework_and_no_wire() -> None:
    assert loaded_by("import kvtier") & {"grpc", "google", *HEAVY} == set()


@pytest.mark.parametrize("module", ["kvtier.daemon.run", "kvtier.cli", "kvtier.client"])
def test_daemon_command_line_and_client_load_no_framework(module: str) -> None:
    assert loaded_by(f"import {module}") & HEAVY == set()
