"""What `kvd top` draws, from recorded reports."""

import copy
from collections.abc import Callable
from dataclasses import asdict
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from kvd.cli.top import picture, share_lines
from kvd.metrics.conditions import conditions
from kvd.metrics.reading import History, Span
from tests.report.reports import (
    GIB,
    START,
    STEEP,
    changed,
    empty_report,
    forecast,
    loaded_report,
)

SECTIONS = [
    *("Pool", "Throughput and hits", "Lanes and their jobs", "Tiers, the last minute"),
    *("Engines", "Events"),
]


def drawn(shown: RenderableType, width: int = 80) -> str:
    """The characters on a terminal of `width` columns."""
    sink = StringIO()
    Console(file=sink, width=width).print(shown)
    return sink.getvalue()


def minute_of(report: Callable[[float], dict[str, Any]]) -> History:
    """A minute of such reports."""
    history = History()
    for second in range(61):
        history.add(report(float(second)))
    return history


@pytest.mark.parametrize("width", [80, 140])
def test_everything_fits_the_terminal(width: int) -> None:
    """At 80 columns nothing is cut off: every section, and the figures in it."""
    text = drawn(picture(minute_of(loaded_report)), width)
    for line in text.splitlines():
        assert len(line.rstrip()) <= width
    for section in SECTIONS:
        assert f" {section} " in text
    for figure in (
        *("All is well", "400 MB/s", "2 GB/s", "75 %", "39 GiB ready, 23 GiB free of 64 GiB"),
        *("12 ms late at most; 4 snapshots, 0 overruns", "llama-70b-1"),
    ):
        assert figure in text
    assert "…" not in text
    assert text.index("412 chunks in writing freed") < text.index("the pool of 64 GiB")


def crowded_report(seconds: float) -> dict[str, Any]:
    """A large node: long names, eight lanes with long figures, more of everything than fits."""
    report = loaded_report(seconds)
    engine, lane, space = report["engines"][0], report["lanes"][1], report["namespaces"][0]
    report["engines"] = [
        copy.deepcopy(engine) | {"name": f"meta-llama-Llama-3.1-70B-Instruct-replica-{index}"}
        for index in range(9)
    ]
    big = {"usable_bytes": 1507 * GIB, "pool_bytes": 2038 * GIB, "queued_jobs": 123_456}
    report["lanes"] = [
        copy.deepcopy(lane) | big | {"device": f"cuda:{index:032x}", "oldest_job_seconds": 1.23}
        for index in range(8)
    ]
    chunks = {"ready": 1_234_567, "writing": 51_234, "pinned": 12_000}
    report["namespaces"] = [
        copy.deepcopy(space)
        | {"model": "meta-llama/Llama-3.1-405B-Instruct-FP8", "chunks": chunks}
        | {"forecast": forecast(*STEEP)}
    ] * 4
    report["pool"]["cpu_bytes"] = 2038 * GIB
    return report | {"time": START + 1e5 + seconds, "host": "gpu-17"}


def test_a_small_terminal_shows_every_figure_whole() -> None:
    """At 80 by 24 a crowded daemon fits: names are shortened, lists say what is left out."""
    history = minute_of(crowded_report)
    lines = drawn(picture(history, 1, 24)).splitlines()
    assert "restarted 1 time" in lines[0]
    text = "\n".join(lines)
    assert len(lines) <= 24
    for figure in (
        *("1,234,567 ready, 12,000 pinned", "1.47 TiB of 1.99 TiB", "123,456", "1.23 s"),
        *("550 µs / 9.1 ms", "75 %", "400 MB/s"),
    ):
        assert figure in text
    assert "…" not in "".join(line for line in lines if "meta-llama" not in line)
    for section in SECTIONS:
        assert f" {section} " in text
    for left in ("and 8 more", "and 7 more", "and 3 more"):  # engines, lanes, namespaces
        assert left in text


@given(st.integers(-5, 60), st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_lines_are_dealt_out_fairly(room: int, wanted: list[int]) -> None:
    """No list gets more than it has, each gets one line, and no room is left that is wanted."""
    given_out = share_lines(room, wanted)
    least = [min(1, want) for want in wanted]
    assert all(low <= got <= want for low, got, want in zip(least, given_out, wanted, strict=True))
    assert sum(given_out) == max(sum(least), min(room, sum(wanted)))


def test_an_idle_daemon_is_drawn_too() -> None:
    """One report of a daemon without engines: no figure is made up, and it is not called well."""
    history = History()
    history.add(empty_report())
    text = drawn(picture(history))
    assert "No engine is attached." in text
    assert "All is well" not in text
    assert "Nothing is wrong, but no engine is attached." in text
    assert "0 %" not in text


def test_what_is_wrong_comes_with_its_remedy() -> None:
    """A lane that is down is named at the top, before the figures."""
    history = minute_of(loaded_report)
    report = changed(loaded_report(61.0), "lanes", 0, "state", to="down")
    history.add(report | {"conditions": [asdict(found) for found in conditions(Span(report))]})
    text = drawn(picture(history))
    assert "All is well" not in text
    assert text.index("Lane host is down") < text.index("kvd doctor") < text.index("Pool")
