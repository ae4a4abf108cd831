"""One line of a doctor's report."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Finding", "Grade", "ok", "problem", "warning"]


class Grade(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """The tier works, slower or with a risk that the operator should know."""
    PROBLEM = "problem"
    """The tier cannot be used as it is, or breaks a promise."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and what to do about it where something is to be done."""

    check: str
    grade: Grade
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, Grade.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """It works; `remedy` makes it better."""
    return Finding(check, Grade.WARNING, found, remedy)


def problem(check: str, found: str, remedy: str = "") -> Finding:
    """It does not work until `remedy` is done (empty where `found` says already what to do)."""
    return Finding(check, Grade.PROBLEM, found, remedy)
