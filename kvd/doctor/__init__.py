"""Whether a machine suits kvd: facts in, findings out. Here is what a finding is."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is: a failure is a daemon that does not start, or not as asked for."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found with its figures, and what to do; empty for nothing."""

    name: str
    level: Level
    text: str
    remedy: str = ""


Verdict = tuple[Level, str, str]


def ok(text: str) -> Verdict:
    """All is well."""
    return Level.OK, text, ""


def warn(text: str, remedy: str) -> Verdict:
    """It works, less well than it could."""
    return Level.WARN, text, remedy


def fail(text: str, remedy: str) -> Verdict:
    """A daemon does not start, or not with what was asked for."""
    return Level.FAIL, text, remedy
