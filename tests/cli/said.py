"""What a command that fails must say."""

from __future__ import annotations

import subprocess


def failed(result: subprocess.CompletedProcess[str], code: int) -> str:
    """The error line of a command that must fail in two lines."""
    assert result.returncode == code, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 2, result.stderr
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("remedy: ")
    assert result.stdout == ""
    return lines[0]
