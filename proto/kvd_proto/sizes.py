"""Sizes and durations as people write them: numbers with units, of which several add up."""

import re
from collections.abc import Mapping
from fractions import Fraction

from kvd_proto.errors import SizeError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BYTES = {"": 1, "b": 1}
_BYTES |= {f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgtp")}
_BYTES |= {f"{letter}ib": 1024 ** (i + 1) for i, letter in enumerate("kmgtp")}
_MILLISECONDS = {"": 1000, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PART = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes from `64GiB`, `512MiB`, `1.5GB` or a plain number; a fraction of a byte is dropped.

    Raises:
        SizeError: it is none of these, or negative.
    """
    size = _parse(str(text), _BYTES)
    if size is None and _parse(f"{text}B", _BYTES) is not None:
        raise SizeError(f"{text!r} is no size", meant=f"{text}B")
    if size is None:
        raise SizeError(f"{text!r} is no size; write bytes or a number with a unit, such as 64GiB")
    return int(size)


def parse_duration(text: str) -> float:
    """Seconds from `90s`, `250ms`, `1h30m`, `1.5h`, `2d` or a plain number.

    Raises:
        SizeError: it is none of these, or negative.
    """
    duration = _parse(text, _MILLISECONDS)
    if duration is None:
        raise SizeError(
            f"{text!r} is no duration; write seconds or numbers with units, such as 90s, 1h30m"
            " or 2d"
        )
    return float(duration / 1000)


def _parse(text: str, units: Mapping[str, int]) -> Fraction | None:
    """Add up the parts of a text; None where there is something else, or a unit is missing."""
    parts = list(_PART.finditer(text))
    names = [part[2].lower() for part in parts]
    known = all(name in units and (name or len(parts) == 1) for name in names)
    if not parts or not known or "".join(part[0] for part in parts) != text:
        return None
    return sum((Fraction(p[1]) * units[n] for p, n in zip(parts, names, strict=True)), Fraction())


def format_size(nbytes: int) -> str:
    """For people: `1.5 GiB`."""
    power = min(max(abs(nbytes).bit_length() - 1, 0) // 10, len(_BINARY) - 1)
    if power == 0:
        return f"{nbytes} B"
    return f"{round(nbytes / 1024**power, 2):g} {_BINARY[power]}"


def format_duration(seconds: float) -> str:
    """For people, the two largest units: `250 ms`, `12.5 s`, `1 h 30 m`, `2 d 3 h`."""
    if seconds < 1:
        return f"{round(seconds * 1000)} ms"
    if seconds < 60:
        return f"{round(seconds, 1):g} s"
    parts, left = list[str](), round(seconds)
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        number, left = divmod(left, size)
        if number or parts:
            parts.append(f"{number} {unit}" if number else "")
    return " ".join(part for part in parts[:2] if part)
