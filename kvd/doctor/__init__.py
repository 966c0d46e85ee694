"""Checks whether a machine suits kvd: facts in, findings out. This module defines findings."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding. FAIL: a daemon does not start, or not as configured."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: its name, severity, text with values, and remedy; empty if none."""

    name: str
    level: Level
    text: str
    remedy: str = ""


Verdict = tuple[Level, str, str]


def ok(text: str) -> Verdict:
    """Return a verdict without a problem."""
    return Level.OK, text, ""


def warn(text: str, remedy: str) -> Verdict:
    """Return a verdict for what works, but not well."""
    return Level.WARN, text, remedy


def fail(text: str, remedy: str) -> Verdict:
    """Return a verdict for what keeps a daemon from starting as configured."""
    return Level.FAIL, text, remedy
