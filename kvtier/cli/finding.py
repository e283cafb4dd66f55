"""One line of the report of `kvtier doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "Grade", "fail", "ok", "warn"]


class Grade(Enum):
    """FAIL: the daemon will not run well; WARN: it will, with less than it could have."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. `remedy` is empty when the grade is OK."""

    check: str
    grade: Grade
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check=check, grade=Grade.OK, found=found)


def warn(check: str, found: str, remedy: str) -> Finding:
    return Finding(check=check, grade=Grade.WARN, found=found, remedy=remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    return Finding(check=check, grade=Grade.FAIL, found=found, remedy=remedy)
