"""What may stand in a name, and how anything else is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_proto.text import printable, unprintable


@pytest.mark.parametrize(
    ("name", "found", "shown"),
    [
        ("a\x1b[2J", "U+001B at 1", "a\\x1b[2J"),
        ("\0", "U+0000 at 0", "\\x00"),
        ("ab\u202ecd", "U+202E at 2", "ab\\u202ecd"),
        ("two\nlines", "U+000A at 3", "two\\nlines"),
        ("\ud800", "U+D800 at 0", "\\ud800"),
    ],
)
def test_the_first_character_that_cannot_be_shown_is_named(
    name: str, found: str, shown: str
) -> None:
    """Escapes, controls, changes of direction and half surrogates are named and written out."""
    assert (unprintable(name), printable(name)) == (found, shown)


@given(st.text(st.characters()))
def test_any_text_becomes_printable(text: str) -> None:
    """Whatever it holds, what is shown has only printable characters, and nothing gets lost."""
    shown = printable(text)
    assert shown.isprintable()
    assert (shown == text) == (unprintable(text) == "")
