"""Durations as people write them: `90s`, `1h30m`, `1.5h`, `2d`, or a plain number of seconds."""

import math
import re
from fractions import Fraction

from kvd_proto.errors import DurationError

_UNITS = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86_400),
}
_NUMBER = r"([0-9]{1,18})(\.[0-9]{1,18})?"
_PLAIN = re.compile(rf"\s*{_NUMBER}\s*", re.ASCII)
_PARTS = re.compile(rf"(?:\s*{_NUMBER}\s*(ms|[smhd]))+\s*", re.ASCII | re.IGNORECASE)
_PART = re.compile(rf"{_NUMBER}\s*(ms|[smhd])", re.ASCII | re.IGNORECASE)


def parse_duration(text: str | float) -> float:
    """Seconds from `90s`, `250ms`, `1h30m`, `1.5h`, `2d` or a plain number.

    Raises:
        DurationError: it is none of these, or negative.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if math.isfinite(text) and text >= 0:
            return float(text)
    elif isinstance(text, str):
        if plain := _PLAIN.fullmatch(text):
            return float(Fraction(plain[1] + (plain[2] or "")))
        if _PARTS.fullmatch(text):
            parts = _PART.findall(text)
            return float(sum(Fraction(n + part) * _UNITS[unit.lower()] for n, part, unit in parts))
    raise DurationError(
        f"{text!r} is no duration; write seconds or numbers with units, such as 90s, 1h30m or 2d"
    )


def format_duration(seconds: float) -> str:
    """For people, the two largest units: `250 ms`, `12.5 s`, `1 h 30 m`, `2 d 3 h`."""
    if seconds < 1:
        return f"{round(seconds * 1000)} ms"
    if seconds < 60:
        return f"{round(seconds, 1):g} s"
    whole = round(seconds)
    for size, unit, smaller_size, smaller in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"
