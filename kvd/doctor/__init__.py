"""Checks whether a machine suits kvd: facts in, findings out. This module defines findings.

`kvd.doctor.start` has the checks that a start must pass; `kvd serve` runs them too.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


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


class Verdict(NamedTuple):
    """What a check says; `Finding` without the name.

    may_pass: a later start may succeed with the same settings.
    """

    level: Level
    text: str
    remedy: str
    may_pass: bool = False


def ok(text: str) -> Verdict:
    """Return a verdict without a problem."""
    return Verdict(Level.OK, text, "")


def warn(text: str, remedy: str) -> Verdict:
    """Return a verdict for what works, but not well."""
    return Verdict(Level.WARN, text, remedy)


def fail(text: str, remedy: str, *, may_pass: bool = False) -> Verdict:
    """Return a verdict for what keeps a daemon from starting as configured."""
    return Verdict(Level.FAIL, text, remedy, may_pass)
