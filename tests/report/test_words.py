"""Figures and names as words."""

import pytest

from kvd.metrics.reading import NAME_LENGTH, shorten
from tests.report.reports import LONG_NAMES


@pytest.mark.parametrize(("name", "short"), LONG_NAMES.items())
def test_long_names_lose_their_middle(name: str, short: str) -> None:
    """Beginning and end stay; of a snapshot's path model and revision."""
    assert shorten(name) == short
    assert len(short) <= NAME_LENGTH
