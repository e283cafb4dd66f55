"""A pytest run inside a test, for tests of what fails tests."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def run_pytest(directory, text, *options):
    """Run the tests in `text` (indented as it likes) in `directory`; the finished process."""
    (directory / "test_it.py").write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *options],
        cwd=directory, capture_output=True, text=True, timeout=50, check=False,
        env={**os.environ, "PYTHONPATH": str(REPO), "PYTEST_ADDOPTS": ""},
    )  # fmt: skip


def outcomes(done, word):
    """Names of the tests that the summary lists under `word` (PASSED, FAILED, ERROR)."""
    prefix = f"{word} test_it.py::"
    return {
        line.removeprefix(prefix).split(" - ")[0].strip()
        for line in done.stdout.splitlines()
        if line.startswith(prefix)
    }
