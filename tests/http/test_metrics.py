"""Metrics of a real daemon under load, and what keeps them few."""

import itertools
import re
import subprocess
import threading
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from docs import generate_status
from kvd.metrics.schema import MAX_ENGINES, REPORT_FIELDS
from kvd.report.app import Exposition, families
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.serving import StartDaemon
from tests.deploy.places import tool
from tests.http.serving import Scrape, over_unix, report_of, scrape
from tests.report.reports import loaded_report
from tests.waiting import eventually

DOCS = Path(__file__).parents[2] / "docs" / "http.md"
ROW = re.compile(r"^\| `(kvd_\w+)` \| \w+ \| (.*?) \| .* \|$", re.MULTILINE)
LOADS = {"direction": "load", "outcome": "ok"}
REPORT = loaded_report(60.0)


def work(engine: Engine, rounds: int) -> None:
    """Store more than the pool holds, load it, offer it again."""
    for number in range(rounds):
        keys = keys_of(f"round-{number}", 10)
        engine.store(keys)
        wait_hit(engine, keys)
        assert engine.load(keys) == (10, 0)
        engine.scheduler.prepare_store(keys)  # there already


def test_scrapes_during_a_workload_agree_with_themselves(start_daemon: StartDaemon) -> None:
    """Totals are those of the parts, nothing that grows ever falls, and work adds no series."""
    daemon = start_daemon(cpu_bytes="2MiB")
    scrapes: list[Scrape] = []
    ended = threading.Event()

    def keep_scraping() -> None:
        with over_unix(daemon) as client:
            while not ended.is_set():
                scrapes.append(scrape(client))
                ended.wait(0.1)

    with Engine(daemon.runtime_dir).wait_attached() as engine, over_unix(daemon) as client:
        work(engine, 1)
        # The lane tells the broker of a load twice a second, not at its end.
        eventually(lambda: scrape(client).total("kvd_jobs_total", **LOADS))
        first = scrape(client)
        scraper = threading.Thread(target=keep_scraping)
        scraper.start()
        try:
            work(engine, 45)
        finally:
            ended.set()
            scraper.join(60)
        last = scrape(client)
    scrapes = [first, *scrapes, last]
    for before, after in itertools.pairwise(scrapes):
        now = after.growing()
        assert not {where for where, value in before.growing().items() if now[where] < value}
        after.check()
    assert last.get("kvd_evicted_chunks_total") > 0
    assert last.get("kvd_load_answered_chunks_total", answer="found") > 0
    assert last.get("kvd_store_answered_chunks_total", answer="present") > 0
    copied = last.total("kvd_job_stage_seconds_count", direction="load", stage="copied")
    assert copied == last.total("kvd_jobs_total", direction="load") > 0
    new = {name for name, _ in last.samples.keys() - first.samples.keys()}
    assert all(name.startswith(("kvd_http_", "kvd_broker_requests")) for name in new)


def test_a_forecast_tells_what_more_memory_brings(start_daemon: StartDaemon) -> None:
    """Of what an engine looks up half is found, a quarter would be in a pool of twice the size.

    /status and /metrics say so. What the engine has in its own memory does not count.
    """
    daemon = start_daemon(cpu_bytes="2MiB")
    with (
        Engine(daemon.runtime_dir, steps=True, counts_tokens=True).wait_attached() as engine,
        over_unix(daemon) as client,
    ):
        scheduler, hot, own = engine.scheduler, keys_of("hot", 1), keys_of("own", 1)
        tokens = engine.layout.blocks_per_chunk * 16 // len(engine.layout.groups)
        chunks = scheduler.num_chunks
        rare = [keys_of(f"rare-{number}", 1) for number in range(chunks * 8 // 5)]
        scheduler.set_prefill_seconds(0.001)
        for turn in (1, 2):
            for keys in rare:
                for asked, found in ((hot, tokens), (keys, 0)):
                    scheduler.count_tokens(tokens, found)
                    scheduler.request_finished(asked)
                scheduler.request_finished(own)
                scheduler.end_step()
            # Of the second turn the daemon knows how long it took.
            counted = turn * 2 * len(rare) * tokens
            eventually(lambda: report_of(client)["counters"]["lookup_tokens"], counted.__eq__)
        (namespace,) = report_of(client)["namespaces"]
        one = scrape(client)
    forecast, labels = namespace["forecast"], {"namespace": namespace["id"][:12], "model": "model"}
    hits = {size["pool"]: size["hit_ratio"] for size in forecast["sizes"]}
    seconds = {size["pool"]: size["prefill_seconds_per_hour"] for size in forecast["sizes"]}
    assert (forecast["requests"], forecast["hit_ratio"]) == (6 * len(rare), 0.5)
    expected = {"now": 0.5, "-50%": 0.5, "+25%": 0.5, "+100%": 0.75, "unlimited": 0.75}
    assert {pool: hits[pool] for pool in expected} == pytest.approx(expected, abs=0.01)
    assert forecast["first_time"] == pytest.approx(1 / 6, abs=0.01)
    assert seconds["unlimited"] == pytest.approx(seconds["now"] / 2, rel=0.02)
    assert {pool: one.get("kvd_would_hit_ratio", pool=pool, **labels) for pool in hits} == hits


def test_promtool_accepts_the_metrics() -> None:
    """Prometheus's own linter passes what is exposed of a daemon with engines."""
    text = generate_latest(Exposition(REPORT, 0.0))
    command = [tool("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_engines_are_shown_up_to_a_bound_and_counted_all() -> None:
    """A crowd of engines makes no crowd of series; the totals still hold them."""
    crowd = [{**REPORT["engines"][0], "name": f"e{i}"} for i in range(200)]
    report = {**REPORT, "engines": crowd}
    metrics = {metric.name: metric for metric in families(report)}
    assert metrics["kvd_engines"].samples[0].value == 200
    assert len(metrics["kvd_engine_attached"].samples) == MAX_ENGINES


def test_every_metric_is_told_with_its_labels() -> None:
    """What is exposed is a row of docs/http.md or of the report, with these labels and no more."""
    documented = {
        name: set(re.findall(r"`(\w+)`", labels)) for name, labels in ROW.findall(DOCS.read_text())
    }
    documented |= {row.metric: set(row.label_names) for row in REPORT_FIELDS if row.metric}
    exposed = {}
    for family in Exposition(REPORT, 0.0).collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == documented[name]
        exposed[name] = family
    assert exposed.keys() == documented.keys()
    labels = {label for labels in documented.values() for label in labels}
    assert not {"key", "pid", "session"} & labels


def test_the_page_of_the_report_is_up_to_date() -> None:
    """docs/status.md is what its generator writes."""
    written = generate_status.PAGE.read_text(encoding="utf-8")
    assert generate_status.page() == written, "run make docs"
