"""Text for people: sizes and durations, text that is safe to show, why a path is denied.

Printable is what `str.isprintable` says: letters, digits, marks, punctuation, symbols and the
plain space. Control characters (ESC, NUL), line ends, other spaces, and characters that change the
direction of text (U+202E) are not printable: no terminal, log line or metric label may get them.
"""

import grp
import os
import pwd
import re
import stat
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvd_proto.errors import SizeError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BYTES = {"": 1, "b": 1}
_BYTES |= {f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgtp")}
_BYTES |= {f"{letter}ib": 1024 ** (i + 1) for i, letter in enumerate("kmgtp")}
_MILLISECONDS = {"": 1000, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_QUANTITY = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Return bytes from `64GiB`, `512MiB`, `1.5GB` or a plain number, rounded down.

    Raises:
        SizeError: `text` is none of these, or negative.
    """
    nbytes = _parse(str(text), _BYTES)
    if nbytes is None and _parse(f"{text}B", _BYTES) is not None:
        raise SizeError(f"{text!r} is no size", suggestion=f"{text}B")
    if nbytes is None:
        raise SizeError(f"{text!r} is no size; write bytes or a number with a unit, such as 64GiB")
    return int(nbytes)


def parse_duration(text: str) -> float:
    """Return seconds from `90s`, `250ms`, `1h30m`, `1.5h`, `2d` or a plain number.

    Raises:
        SizeError: `text` is none of these, or negative.
    """
    milliseconds = _parse(text, _MILLISECONDS)
    if milliseconds is None:
        raise SizeError(
            f"{text!r} is no duration; write seconds or numbers with units, such as 90s, 1h30m"
            " or 2d"
        )
    return float(milliseconds / 1000)


def _parse(text: str, units: Mapping[str, int]) -> Fraction | None:
    """Return the sum of the quantities in `text`; None if any of it has another form or unit."""
    quantities = list(_QUANTITY.finditer(text))
    names = [quantity[2].lower() for quantity in quantities]
    known = all(name in units and (name or len(quantities) == 1) for name in names)
    if not quantities or not known or "".join(match[0] for match in quantities) != text:
        return None
    pairs = zip(quantities, names, strict=True)
    return sum((Fraction(match[1]) * units[name] for match, name in pairs), Fraction())


def format_size(nbytes: int) -> str:
    """Return a size for people: `1.5 GiB`."""
    power = min(max(abs(nbytes).bit_length() - 1, 0) // 10, len(_BINARY) - 1)
    if power == 0:
        return f"{nbytes} B"
    return f"{round(nbytes / 1024**power, 2):g} {_BINARY[power]}"


def format_duration(seconds: float) -> str:
    """Return a duration for people: `250 ms`, `12.5 s`, `1 h 30 m`.

    In its largest unit and the next smaller one, unless that is 0.
    """
    if seconds < 1:
        return f"{round(seconds * 1000)} ms"
    if seconds < 60:
        return f"{round(seconds, 1):g} s"
    words, remaining = list[str](), round(seconds)
    for unit, unit_seconds in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        number, remaining = divmod(remaining, unit_seconds)
        if number or words:
            words.append(f"{number} {unit}" if number else "")
    return " ".join(word for word in words[:2] if word)


def unprintable(text: str) -> str:
    """Return the first unprintable character, such as `U+001B at 1`; empty if there is none."""
    for index, character in enumerate(text):
        if not character.isprintable():
            return f"U+{ord(character):04X} at {index}"
    return ""


def printable(text: str) -> str:
    r"""Return `text` with each unprintable character replaced by its escape, such as `\x1b`."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )


def printable_tree(value: Any) -> Any:
    """Return plain data (dict, list, str and numbers) with every string, keys too, printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_tree(key): printable_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable_tree(item) for item in value]
    return value


def explain_denied(path: Path) -> str | None:
    """Return why this process may not use `path`, and the remedy, in one line; None: it may.

    The process must be able to enter each directory above `path`, to enter `path` if it is a
    directory, to write a socket there, and to read any other file. Directories are checked from
    the root down: below one that cannot be entered nothing can be checked.
    """
    real = Path(os.path.realpath(path))  # resolves links up to the first unreadable one
    for directory in reversed(real.parents):
        if reason := _explain(directory, "enter", os.X_OK):
            return reason
    try:
        mode = real.stat().st_mode
    except OSError:
        return None
    if stat.S_ISDIR(mode):
        return _explain(real, "enter", os.X_OK)
    if stat.S_ISSOCK(mode):
        return _explain(real, "connect to", os.W_OK)
    return _explain(real, "read", os.R_OK)


def _explain(path: Path, verb: str, access: int) -> str | None:
    try:
        status = path.stat()
    except OSError:  # it does not exist
        return None
    if os.access(path, access, effective_ids=True):
        return None
    uid, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    group = _group_name(status.st_gid)
    reason = f"uid {uid} may not {verb} {path} (mode {mode:04o}, group {group})"
    if status.st_gid == 0 or not mode & (access << 3):
        owner = user_name(status.st_uid)
        return f"{reason}: run this as {owner}{'' if owner == 'root' else ' or root'}"
    if _is_member(uid, status.st_gid):
        return f"{reason}: {user_name(uid)} is a member now; log in again, or run: newgrp {group}"
    return f"{reason}: usermod -aG {group} {user_name(uid)}, then log in again"


def _is_member(uid: int, gid: int) -> bool:
    """Whether /etc/group puts this user into the group; this process may have started earlier."""
    try:
        user = pwd.getpwuid(uid)
        return gid in os.getgrouplist(user.pw_name, user.pw_gid)
    except KeyError:
        return False


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def user_name(uid: int) -> str:
    """Return the user's name, or its number if it has no name here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
