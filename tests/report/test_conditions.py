"""What is wrong and what to do, from reports alone."""

from typing import Any

import pytest

from kvd.metrics.conditions import CONDITIONS, conditions
from kvd.metrics.reading import Span
from tests.report.reports import AGES, changed, empty_report, histogram, loaded_report

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
    """No rule is without a test; missing ranks has one of its own."""
    rules = {rule.name for rules in CONDITIONS.values() for rule in rules}
    assert rules == {case[0] for case in CASES} | {"missing ranks"}


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
