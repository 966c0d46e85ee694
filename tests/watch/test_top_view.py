"""What `kvd top` draws, from recorded reports."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from kvd.cli.top_view import picture, waiting
from kvd.watch.history import History
from tests.watch.reports import changed, empty_report, loaded_report

SECTIONS = ["Pool", "Throughput and hits", "Lanes and their jobs", "Engines", "Events"]


def drawn(shown: RenderableType, width: int = 80) -> str:
    """The characters on a terminal of `width` columns."""
    sink = StringIO()
    Console(file=sink, width=width).print(shown)
    return sink.getvalue()


def loaded_history() -> History:
    """A minute of steady load."""
    history = History()
    for second in range(61):
        history.add(loaded_report(float(second)))
    return history


@pytest.mark.parametrize("width", [80, 140])
def test_everything_fits_the_terminal(width: int) -> None:
    """At 80 columns nothing is cut off: every section, and the figures in it."""
    text = drawn(picture(loaded_history()), width)
    for line in text.splitlines():
        assert len(line.rstrip()) <= width
    for section in SECTIONS:
        assert f" {section} " in text
    assert "ready" in text
    assert "All is well" in text
    assert "400 MB/s" in text
    assert "2 GB/s" in text
    assert "75 %" in text
    assert "10 GiB free of 64 GiB" in text
    assert "llama-70b-1" in text
    assert "…" not in text
    assert text.index("412 chunks in writing freed") < text.index("the pool of 64 GiB")


def test_an_idle_daemon_is_drawn_too() -> None:
    """One report of a daemon without engines: no figure is made up."""
    history = History()
    history.add(empty_report())
    text = drawn(picture(history))
    assert "No engine is attached." in text
    assert "0 %" not in text


def test_what_is_wrong_comes_with_its_remedy() -> None:
    """A lane that is down is named at the top, before the figures."""
    history = loaded_history()
    history.add(changed(loaded_report(61.0), "lanes", 0, "state", to="down"))
    text = drawn(picture(history))
    assert "All is well" not in text
    assert text.index("Lane host is down") < text.index("kvd doctor") < text.index("Pool")


def test_a_restart_is_said() -> None:
    """How often the daemon was started anew stands in the first line."""
    assert "restarted 1 time" in drawn(picture(loaded_history(), 1)).splitlines()[0]


def test_many_engines_leave_room_for_the_rest() -> None:
    """Above a dozen engines the others are counted."""
    report = loaded_report()
    report["engines"] *= 5
    history = History()
    history.add(report)
    assert "and 3 more" in drawn(picture(history))


def test_without_a_daemon_it_says_what_it_waits_for() -> None:
    """The runtime directory is named."""
    assert "Waiting for a daemon in /run/kvd." in drawn(waiting(Path("/run/kvd"), "none"))
