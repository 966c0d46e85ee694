"""Figures and names as words for people, a few characters each."""

import re

from kvd_proto.text import format_size

NOTHING = "\N{EN DASH}"
NAME_LENGTH = 27
_SNAPSHOT = re.compile(r".*/models--(?:[^/]*--)?([^/]+)/snapshots/([0-9a-f]{8})[0-9a-f]*/?")


def size(nbytes: float | None) -> str:
    """`1.5 GiB`."""
    return NOTHING if nbytes is None else format_size(int(nbytes))


def rate(per_second: float | None) -> str:
    """Bytes per second in decimal units, as rates are given: `1.25 GB/s`."""
    if per_second is None:
        return NOTHING
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if per_second >= scale:
            return f"{per_second / scale:.3g} {unit}"
    return f"{per_second:.0f} B/s"


def percent(share: float | None) -> str:
    """`87 %`; a share is between 0 and 1."""
    return NOTHING if share is None else f"{100 * share:.3g} %"


def number(value: float | None) -> str:
    """A count, with thousands apart."""
    return NOTHING if value is None else f"{round(value):,}"


def latency(seconds: float | None) -> str:
    """`85 µs`, `1.2 ms`, `3.4 s`."""
    if seconds is None:
        return NOTHING
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def duration(seconds: float | None, units: int = 2) -> str:
    """`4 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`: the largest units, one or two."""
    if seconds is None:
        return NOTHING
    left = max(0, int(seconds))
    parts = []
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= length:
            parts.append(f"{left // length} {unit}")
            left %= length
    return " ".join(parts[:units]) or "0 s"


def several(count: float, singular: str, plural: str | None = None) -> str:
    """`1 chunk`, `12 chunks`."""
    word = singular if round(count) == 1 else plural or f"{singular}s"
    return f"{number(count)} {word}"


def shorten(name: str) -> str:
    """`vllm-llama-3-…d8f6b5d-x2k4q`: at most `NAME_LENGTH` characters, the middle left out.

    A path in a Hugging Face cache becomes model and revision first: `Qwen3-8B@6f6073b4`. The
    page's `shorten` (kvd/report/page/words.js) follows the same rule.
    """
    if len(name) <= NAME_LENGTH:
        return name
    name = _SNAPSHOT.sub(r"\1@\2", name)
    if len(name) <= NAME_LENGTH:
        return name
    head = NAME_LENGTH // 2
    return f"{name[:head]}…{name[head + 1 - NAME_LENGTH :]}"
