"""CONTRIBUTING.md and the Makefile name the same commands."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_make_target_is_in_the_table_with_the_time_that_it_takes() -> None:
    """No target without a row, no row without a target, no row without a time or its lack."""
    targets = set(re.findall(r"^([a-z0-9-]+):.*##", MAKEFILE, re.MULTILINE)) - {"help"}
    rows = re.findall(r"^\| (`make .+?) \| .+ \| (.+) \|$", PAGE, re.MULTILINE)
    listed = [name for commands, _ in rows for name in re.findall(r"`make ([a-z0-9-]+)", commands)]
    assert sorted(listed) == sorted(targets)
    assert all(re.search(r"\d+ (s|min|h)\b|not timed", time) for _, time in rows)
