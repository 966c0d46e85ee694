"""Figures of reports, what they say is wrong, and what `kvd top` draws of them."""

import copy
from collections.abc import Callable
from dataclasses import asdict
from io import StringIO
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from kvd.broker.forecast import advice
from kvd.cli.top import picture, share_lines
from kvd.metrics.conditions import CONDITIONS, conditions
from kvd.metrics.declare import Histogram
from kvd.metrics.reading import NAME_LENGTH, History, Span, shorten
from kvd.metrics.schema import ForecastStatus
from tests.report.reports import (
    AGES,
    GIB,
    LONG_NAMES,
    START,
    STEEP,
    changed,
    empty_report,
    forecast,
    histogram,
    loaded_report,
)

BOUNDS = (0.001, 0.5, 1.0, 60.0)
VALUES = st.lists(st.one_of(st.floats(0, 1e6), st.sampled_from([0.0, *BOUNDS])), max_size=50)


def of(values: list[float]) -> Histogram:
    """A histogram that has seen `values` one by one."""
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    return histogram


@given(VALUES)
def test_many_at_once_count_as_one_by_one(values: list[float]) -> None:
    """`observe_all` does what `observe` does for each, and every value counts once."""
    one_by_one, at_once = of(values), Histogram(BOUNDS)
    at_once.observe_all(np.array(values, np.float64))
    assert at_once.counts == one_by_one.counts
    assert at_once.sum == pytest.approx(one_by_one.sum)
    assert at_once.count == len(values)


@given(VALUES, VALUES)
def test_a_sum_has_seen_what_both_have(left: list[float], right: list[float]) -> None:
    """Adding two is counting the values of both; neither changes."""
    first, second = of(left), of(right)
    both = first + second
    assert both.counts == of(left + right).counts
    assert both.sum == pytest.approx(sum(left) + sum(right))
    assert (first.counts, second.counts) == (of(left).counts, of(right).counts)


@pytest.mark.parametrize(
    ("counts", "q", "value"),
    [
        ([10, 0, 0, 0, 0], 0.5, 0.0005),
        ([50, 50, 0, 0, 0], 0.99, 0.49002),
        ([0, 0, 0, 0, 7], 0.5, 60.0),
        ([0, 0, 0, 0, 0], 0.5, None),
    ],
)
def test_quantiles_are_estimated_within_ranges(
    counts: list[int], q: float, value: float | None
) -> None:
    """A straight line between a range's bounds; nothing of an empty histogram."""
    assert Histogram(BOUNDS, counts).quantile(q) == pytest.approx(value)


def test_rates_are_growth_per_second() -> None:
    """Bytes per second come from two reports of one boot."""
    span = Span(loaded_report(10.0), loaded_report(5.0))
    assert span.rise("counters", "store_bytes") == 5 * 4 * 10**8
    assert span.rate("counters", "load_bytes") == 2 * 10**9
    assert span.share("hit_tokens", "lookup_tokens") == 0.75
    assert [lane.rate("counters", "load_bytes") for lane in span.parts("lanes")] == [10**9] * 2
    assert span.parts("engines")[2].rise("counters", "lookup_chunks") == 500


@pytest.mark.parametrize(("name", "short"), LONG_NAMES.items())
def test_long_names_lose_their_middle(name: str, short: str) -> None:
    """Beginning and end stay; of a snapshot's path model and revision."""
    assert shorten(name) == short
    assert len(short) <= NAME_LENGTH


FLAT = (0.6, 0.609, 0.61, 0.611, 0.612, 0.613, 0.614, 0.615)
HALVED = (0.609, 0.61, *FLAT[2:])
RISING = (0.1, 0.11, 0.12, 0.13, 0.14, 0.15, 0.2, 0.6)


@pytest.mark.parametrize(
    ("hit_ratios", "knows_seconds", "sentence"),
    [
        (STEEP, True, "Buy memory: +64 GiB would save 410 prefill seconds an hour and find 48.5 %"),
        (STEEP, False, "Buy memory: +64 GiB would find 48.5 % of the prompt tokens instead of 28"),
        (FLAT, True, "Buy neither memory nor a tier: 61 % of the prompt tokens are found, 61.5"),
        (HALVED, True, "Buy neither: half of the pool would also find 61 % of the prompt tokens."),
        (RISING, True, "Add a tier, or enlarge it: without limit 60 % of the prompt tokens"),
    ],
)
def test_one_sentence_says_what_to_buy(
    hit_ratios: tuple[float, ...], knows_seconds: bool, sentence: str
) -> None:
    """Memory, a tier or neither; without a prefill rate no seconds are made up."""
    report = forecast(*hit_ratios)
    for size in report["sizes"] if not knows_seconds else ():
        size["prefill_seconds_per_hour"] = None
    assert advice(msgspec.convert(report, ForecastStatus)).startswith(sentence)


LATER = 60.0
LANE = ("lanes", 1)
EVICTED = ("namespaces", 0, "counters", "eviction_age")
PUBLISHED = ("engines", 0, "published")
TIER = ("tiers", 0)
FAILED = {"name": "pool", "ok": False, "text": "40 % pinned, 9 s left"}

Change = tuple[tuple[str | int, ...], Any]


# What is changed in a healthy report, the rule that must speak, and words it must say.
CASES: list[tuple[str, Change, list[str]]] = [
    ("lane down", ((*LANE, "state"), "down"), ["cuda:", "kvd doctor"]),
    (
        "lane stopped",
        ((*LANE, "stopped"), "pid 9 is stopped (state T)"),
        ["cuda:", "pid 9", "-CONT"],
    ),
    ("lane starting", ((*LANE, "state"), "starting"), ["cuda:"]),
    ("not ready", (("checks", 0), FAILED), ["Pool: 40 % pinned"]),
    ("pinning", ((*LANE, "pin_error"), "no memory"), ["no memory", "64 GiB", "kernel memory"]),
    ("draining", (("draining",), True), ["kvd resume"]),
    ("lane silent", ((*LANE, "seconds_since_heard"), 4.2), ["4 s"]),
    ("lane restarted", ((*LANE, "counters", "restarts"), 1), ["cuda:"]),
    ("old jobs", ((*LANE, "oldest_job_seconds"), 75.0), ["1 min 15 s", "3 jobs"]),
    ("no room", (("counters", "unstored"), 10**6), [" %", "cpu_bytes"]),
    ("failed loads", ((*LANE, "counters", "jobs", "load_failed"), 2), ["2 loads", "2 failed"]),
    ("failed stores", ((*LANE, "counters", "jobs", "store_timeout"), 1), ["1 store of"]),
    ("loop lag", (("broker", "loop_lag_max_seconds"), 0.4), ["400 ms"]),
    ("descriptors", (("broker", "open_fds"), 4000), ["4000 of 4096", "LimitNOFILE"]),
    ("sessions", (("sessions", "open"), 1000), ["1000 of 1024", "max_sessions"]),
    ("tier starting", ((*TIER, "state"), "starting"), ["Tier disk"]),
    ("tier down", ((*TIER, "state"), "down"), ["Tier disk", "kvd doctor"]),
    (
        "tier stopped",
        ((*TIER, "stopped"), "pid 9 is stopped (state T)"),
        ["disk", "pid 9", "-CONT"],
    ),
    ("tier set aside", ((*TIER, "set_aside_seconds"), 75.0), ["disk", "1 min 15 s", "iostat"]),
    ("tier unopened", ((*TIER, "unopened_seconds"), 75.0), ["disk", "1 min 15 s", "iostat"]),
    ("tier corrupt", ((*TIER, "counters", "gets", "corrupt"), 2), ["2 chunks", "disk", "smartctl"]),
    ("tier failed", ((*TIER, "counters", "puts", "failed"), 1), ["1 chunk of tier disk"]),
    ("tier full", ((*TIER, "full"), True), ["100 GiB of 500 GiB", "file system"]),
    ("tier behind", ((*TIER, "counters", "unkept"), 300), ["18,000 chunks an hour", "keep=asked"]),
    ("replies dropped", ((*LANE, "counters", "dropped_replies"), 1), ["1 reply"]),
    ("messages dropped", (("broker", "dropped_frames"), 5), ["5 messages"]),
    ("leases expired", (("counters", "leases_expired"), 2), ["2 leases"]),
    ("stores given up", (("counters", "tickets_expired"), 2), ["2 chunks"]),
    ("evicted young", (EVICTED, histogram(AGES, 0, 9)), ["llama"]),
    ("engine's events late", ((*PUBLISHED, "lag_max_seconds"), 75.0), ["llama", "75 s", "CPU"]),
    ("engine's events overrun", ((*PUBLISHED, "kv_event_overruns"), 1), ["llama", "change_ring"]),
    ("few hits", (("counters", "hit_chunks"), 0), ["0 %"]),
]


@pytest.mark.parametrize("report", [empty_report, loaded_report])
def test_a_healthy_daemon_needs_no_advice(report: Any) -> None:
    """Nothing is said of a daemon that idles or works."""
    assert conditions(Span(report(LATER), report(0.0))) == []
    assert conditions(Span(report(LATER))) == []


@pytest.mark.parametrize(("rule", "change", "words"), CASES, ids=[case[0] for case in CASES])
def test_each_rule_speaks_of_its_case_alone(rule: str, change: Change, words: list[str]) -> None:
    """One thing goes wrong: its rule speaks, names the figures and the remedy, no other does."""
    path, value = change
    before = changed(loaded_report(0.0), *EVICTED, to=histogram(AGES))
    span = Span(changed(loaded_report(LATER), *path, to=value), before)
    (problem,) = conditions(span)
    assert problem.name == rule
    for word in words:
        assert word in f"{problem.text} {problem.remedy}"
    assert problem.text.endswith(".")
    assert problem.remedy.endswith(".")


def test_every_rule_has_a_case() -> None:
    """`missing ranks` has a test of its own."""
    rules = {rule.name for rules in CONDITIONS.values() for rule in rules}
    assert rules == {case[0] for case in CASES} | {"missing ranks"}


@pytest.mark.parametrize(
    ("number", "others"),
    [
        (1, ""),
        (2, " The same holds for 1 other namespace: llama-1."),
        (4, " The same holds for 3 other namespaces: llama-1, llama-2, llama-3."),
        (6, " The same holds for 5 other namespaces: llama-1, llama-2, llama-3 and 2 more."),
    ],
)
def test_what_holds_for_several_is_one_condition(number: int, others: str) -> None:
    """Six models that are evicted young are one hint: how many they are, and the first few."""
    before, now = loaded_report(0.0), loaded_report(LATER)
    for report, ages in ((before, histogram(AGES)), (now, histogram(AGES, 0, 9))):
        model = changed(report["namespaces"][0], "counters", "eviction_age", to=ages)
        report["namespaces"] = [
            model | {"id": str(index), "model": f"llama-{index}"} for index in range(number)
        ]
    (hint,) = conditions(Span(now, before))
    assert hint.text.startswith("Chunks of llama-0 are evicted")
    assert hint.text.partition("for this load.")[2] == others


@pytest.mark.parametrize("items", ["lanes", "engines", "namespaces", "tiers"])
def test_every_rule_of_a_list_speaks_once(items: str) -> None:
    """Whatever is wrong with all items of a list, no rule has a second condition for it."""
    before, now = loaded_report(0.0), loaded_report(LATER)
    for rule, (path, value), _ in CASES:
        if path[0] != items:
            continue
        report = changed(now, *path, to=value)
        place, broken = path[1], report[items][path[1]]
        id_field = "id" if items == "namespaces" else "device" if items == "lanes" else "name"
        report[items] = [broken | {id_field: f"{index:02}"} for index in range(24)]
        start = before[items][place]
        start = start | {"counters": start["counters"] | {"eviction_age": histogram(AGES)}}
        earlier = before | {items: [start | {id_field: f"{index:02}"} for index in range(24)]}
        names = [condition.name for condition in conditions(Span(report, earlier))]
        assert names.count(rule) == 1


def test_ranks_may_start_apart_but_not_for_long() -> None:
    """An engine's missing ranks are a problem only after a while, and are named."""
    report = loaded_report(LATER)
    engine = report["engines"][0]
    engine |= {"attached": False, "missing_ranks": [1, 3]}
    for session in engine["sessions"]:
        session["seconds"] = 5.0
    assert conditions(Span(report)) == []
    engine["sessions"][0]["seconds"] = 200.0
    (problem,) = conditions(Span(report))
    assert "Engine llama-70b-0 has waited 3 min 20 s for ranks 1, 3 of 4" in problem.text


SECTIONS = "Pool|Throughput and hits|Lanes and their jobs|Tiers, the last minute|Engines|Events"


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
    for section in SECTIONS.split("|"):
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
    for section in SECTIONS.split("|"):
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


def test_what_is_wrong_comes_first_with_its_remedy() -> None:
    """A lane that is down is named before the figures; without engines no figure is made up."""
    history = minute_of(loaded_report)
    report = changed(loaded_report(61.0), "lanes", 0, "state", to="down")
    history.add(
        report | {"conditions": [asdict(condition) for condition in conditions(Span(report))]}
    )
    text = drawn(picture(history))
    assert "All is well" not in text
    assert text.index("Lane host is down") < text.index("kvd doctor") < text.index("Pool")
    idle = History()
    idle.add(empty_report())
    text = drawn(picture(idle))
    assert "No engine is attached." in text
    assert "All is well" not in text
    assert "Nothing is wrong, but no engine is attached." in text
    assert "0 %" not in text
