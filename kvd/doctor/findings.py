"""What the doctor says."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line.

    name: what was looked at. text: what was found, with its figures. remedy: what to do; empty
    where nothing is to be done.
    """

    name: str
    level: Level
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(name, Level.OK, text)


def warn(name: str, text: str, remedy: str) -> Finding:
    """It works, less well than it could."""
    return Finding(name, Level.WARN, text, remedy)


def fail(name: str, text: str, remedy: str) -> Finding:
    """A daemon does not start, or not with what was asked for."""
    return Finding(name, Level.FAIL, text, remedy)
