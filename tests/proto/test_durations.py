"""Durations as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_proto.durations import format_duration, parse_duration
from kvd_proto.errors import DurationError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0", 0),
        ("90s", 90),
        (" 90 s ", 90),
        ("250ms", 0.25),
        ("1h30m", 5400),
        ("1h 30m 5s", 5405),
        ("1.5h", 5400),
        ("0.1s", 0.1),
        ("2D", 172_800),
        (12, 12),
        (0.5, 0.5),
    ],
)
def test_a_duration_is_read(text: str | float, seconds: float) -> None:
    """Numbers are seconds, units add up, case and spaces do not matter."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "h", "1x", "-1s", "1h30", "1,5h", "soon", "1 2", -1, float("nan"), True]
)
def test_what_is_no_duration_is_refused_with_the_remedy(text: str | float) -> None:
    """The sentence names the value and shows how to write it."""
    with pytest.raises(DurationError, match="1h30m") as refusal:
        parse_duration(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.25, "250 ms"),
        (12.34, "12.3 s"),
        (60, "1 m"),
        (90, "1 m 30 s"),
        (5400, "1 h 30 m"),
        (90_000, "1 d 1 h"),
    ],
)
def test_a_duration_is_written_for_people(seconds: float, text: str) -> None:
    """The two largest units, and no more figures than matter."""
    assert format_duration(seconds) == text


@given(st.integers(60, 10**7))
def test_what_is_written_can_be_read_again(seconds: int) -> None:
    """Reading what was written gives the duration to the second unit's precision."""
    read = parse_duration(format_duration(seconds))
    assert read <= seconds < read + max(3600 if seconds >= 86_400 else 60, 1)
