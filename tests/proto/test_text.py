"""Sizes and durations as people write them, and what may stand in a name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_proto.errors import SizeError
from kvd_proto.text import (
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    printable,
    unprintable,
)

GIB = 1024**3


def test_sizes_and_durations_are_read() -> None:
    """Decimal and binary units or plain bytes; seconds, or units that add up, in any case."""
    sizes: dict[str | int, int] = {
        "64GiB": 64 * GIB,
        "1.5GB": 1_500_000_000,
        " 2 kib ": 2048,
        "123": 123,
        4096: 4096,
    }
    assert {text: parse_size(text) for text in sizes} == sizes
    durations = {"90": 90, " 90 s ": 90, "250ms": 0.25, "1h 30m 5s": 5405, "2D": 172_800}
    assert {text: parse_duration(text) for text in durations} == durations


def test_what_is_no_size_or_duration_is_refused_with_the_remedy() -> None:
    """With an example or what was probably meant; a duration's sentence names the value."""
    for size in ("", "GiB", "64Gi", "-1GiB", "1e9", "1,5GB", "1.GB", "9" * 400, -1, True, "٣GiB"):
        with pytest.raises(SizeError, match=r"such as 64GiB|did you mean 64GiB\?"):
            parse_size(size)
    for text in ("", "h", "1x", "-1s", "1h30", "1,5h", "soon", "1 2", "-1", "nan"):
        with pytest.raises(SizeError, match=f"{text!r}.*1h30m"):
            parse_duration(text)


@given(st.integers(0, 1023), st.sampled_from(["B", "KiB", "MiB", "GiB"]), st.integers(60, 10**7))
def test_what_is_written_can_be_read_again(number: int, unit: str, seconds: int) -> None:
    """A whole number of a unit is the same, a duration to the precision of its second unit."""
    size = parse_size(f"{number}{unit}")
    assert parse_size(format_size(size)) == size
    duration = parse_duration(format_duration(seconds))
    assert duration <= seconds < duration + (3600 if seconds >= 86_400 else 60)


@given(st.text(st.characters()))
def test_any_text_becomes_printable(text: str) -> None:
    """Whatever it holds, what is shown has only printable characters, and nothing gets lost."""
    shown = printable(text)
    assert shown.isprintable()
    assert (shown == text) == (unprintable(text) == "")


def test_the_first_character_that_cannot_be_shown_is_named() -> None:
    """Escapes, changes of direction and half surrogates are named and written out."""
    for name, first, shown in (
        ("a\x1b[2J", "U+001B at 1", "a\\x1b[2J"),
        ("ab\u202ecd", "U+202E at 2", "ab\\u202ecd"),
        ("\ud800", "U+D800 at 0", "\\ud800"),
    ):
        assert (unprintable(name), printable(name)) == (first, shown)
