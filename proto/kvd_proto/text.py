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


def unprintable(text: str) -> str:
    """The first character that may not stand in a name, such as `U+001B at 1`; empty if none."""
    for index, character in enumerate(text):
        if not character.isprintable():
            return f"U+{ord(character):04X} at {index}"
    return ""


def printable(text: str) -> str:
    r"""The text with `\x1b` and the like in place of what is not printable."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )


def printable_tree(value: Any) -> Any:
    """Plain data (dict, list, str and numbers) in which every text, keys too, is printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_tree(key): printable_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable_tree(item) for item in value]
    return value


def explain_denied(path: Path) -> str | None:
    """Return which directory on `path` this process may not enter, and the remedy, in one line.

    Directories are checked from the root down, because nothing below the first one can be seen.
    A file at `path` itself must be readable, a socket writable. None where nothing is denied.
    """
    real = Path(os.path.realpath(path))  # where a link cannot be read: as far as it can be
    for directory in reversed(real.parents):
        if denied := _explain(directory, "enter", os.X_OK):
            return denied
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
    except OSError:  # it is not there
        return None
    if os.access(path, access, effective_ids=True):
        return None
    uid, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    group = _group_name(status.st_gid)
    denied = f"uid {uid} may not {verb} {path} (mode {mode:04o}, group {group})"
    if status.st_gid == 0 or not mode & (access << 3):
        owner = _user_name(status.st_uid)
        return f"{denied}: run this as {owner}{'' if owner == 'root' else ' or root'}"
    if _is_member(uid, status.st_gid):
        return f"{denied}: {_user_name(uid)} is a member now; log in again, or run: newgrp {group}"
    return f"{denied}: usermod -aG {group} {_user_name(uid)}, then log in again"


def _is_member(uid: int, gid: int) -> bool:
    """Whether the system's files put this user into the group; the process may be older."""
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


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
