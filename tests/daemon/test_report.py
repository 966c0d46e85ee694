"""The report, and that its figures agree."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvd.metrics.counts import STAGES
from kvd.metrics.reading import size
from kvd.wire.tool import ToolConnection
from kvd_client import LookupResult
from kvd_proto.messages import Drain, Resume
from tests.conftest import StartDaemon
from tests.daemon.engines import Engine, keys_of, make_layout, wait_hit
from tests.daemon.serving import Daemon, daemon_left_clean, run_kvd
from tests.http.serving import Scrape, over_unix
from tests.waiting import PATIENCE, eventually

REFUSED = ("present", "pending", "full", "quota", "not_yet", "draining")


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> Daemon:
    """A pool of sixteen chunks, so that some are evicted; with a quota, to be reported."""
    return start_daemon("--quota", '{model = {floor = "1MiB", cap = "100%"}}', cpu_bytes="8MiB")


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    """Two ranks."""
    with Engine(daemon.runtime_dir, layout=make_layout(page=64 * 1024)).wait_attached() as engine:
        yield engine


def work(engine: Engine) -> None:
    """Store more than fits, look up, load what is there and what is not, offer again."""
    for name in "abcdef":
        assert len(engine.store(keys_of(name, 4))) == 4
    # The broker hears of the last shares a little later.
    eventually(lambda: not engine.scheduler.status()["namespaces"][0]["chunks"]["writing"])
    assert engine.load(keys_of("f", 4)) == (4, 0)
    assert engine.load(keys_of("a", 4)) == (0, 0)
    engine.scheduler.prepare_store(keys_of("f", 4))
    found = engine.scheduler.lookup_many([*keys_of("f", 4), *keys_of("a", 2)])
    assert found.count(LookupResult.HIT) == 4


def test_figures_agree(daemon: Daemon, engine: Engine) -> None:
    """Keys by answer, bytes by state, jobs by stage and evictions by age all add up."""
    work(engine)
    ticket = engine.scheduler.prepare_load(keys_of("f", 1))
    with ToolConnection(daemon.runtime_dir, PATIENCE) as control:
        control.request(Drain())
        engine.scheduler.prepare_store(keys_of("late", 3))
        eventually(lambda: daemon.status()["counters"]["draining"] == 3)
        control.request(Resume())
    moved = {way: n * engine.scheduler.bytes_per_chunk for way, n in (("store", 24), ("load", 4))}
    report = eventually(
        daemon.status,
        lambda report: (
            all(report["counters"][f"{way}_bytes"] == n for way, n in moved.items())
            and report["counters"]["lookup_chunks"] >= 6
        ),
    )
    assert {name for name, n in report["counters"]["jobs"].items() if n} == {"store_ok", "load_ok"}
    for counters in (report["counters"], *(each["counters"] for each in report["namespaces"])):
        assert counters["accepted"] == counters["stored"] == 24
        assert counters["present"] == 4
        assert counters["draining"] == 3
        assert counters["offered"] == counters["accepted"] + sum(counters[r] for r in REFUSED)
        assert (counters["asked"], counters["hits"], counters["pins_late"]) == (5, 5, 0)
        assert counters["stores_lost"] == counters["stores_raced"] == 0
    (namespace,) = report["namespaces"]
    (lane,) = report["lanes"]
    (reported,) = report["engines"]
    for state in ("ready", "writing", "draining"):
        nbytes = namespace["chunks"][state] * namespace["bytes_per_chunk"]
        assert namespace[f"{state}_bytes"] == nbytes
    assert namespace["held_bytes"] + report["pool"]["free_bytes"] == report["pool"]["cpu_bytes"]
    assert report["pool"]["allocated_bytes"] == lane["usable_bytes"] == lane["pool_bytes"]
    evicted = namespace["counters"]["evicted"]
    assert evicted == 24 - namespace["chunks"]["ready"] > 0
    assert sum(namespace["counters"]["eviction_age"]["counts"]) == evicted
    for way in ("store", "load"):
        for stage in STAGES:
            assert (
                sum(lane["counters"]["stages"][f"{way}_{stage}"]["counts"])
                == lane["counters"]["jobs"][f"{way}_ok"]
            )
        assert report["counters"][f"{way}_bytes"] == lane["counters"][f"{way}_bytes"] > 0
    assert namespace["tokens_per_chunk"] == 32
    assert reported["counters"] == {
        "lookup_chunks": 6,
        "hit_chunks": 4,
        "lookup_tokens": 0,
        "hit_tokens": 0,
        "aborted_requests": 0,
        "detached_tokens": 0,
        "hints": 0,
        "hints_ignored": 0,
        "hints_cut": 0,
    }
    assert report["counters"]["hit_chunks"] == 4
    assert (report["leases"], namespace["chunks"]["pinned"]) == (1, 1)
    engine.scheduler.complete_load(ticket)
    assert report["broker"]["requests"]["Step"] >= 6 + 1 + 1 + 2
    assert report["broker"]["refusals"] == {}
    assert report["sessions"]["open"] == 3 + 1  # who asks counts too
    assert all(check["ok"] for check in report["checks"])
    longest = report["broker"]["loop_lag_max_seconds"]
    assert 0 < longest <= report["broker"]["loop_lag"]["sum"]
    assert report["started"] < report["time"]
    assert report["broker"]["open_fds"] > 0


TIER = "memory:,size=64MiB,late=30"
CHUNKS = 8


@pytest.fixture(scope="module")
def tiered_daemon() -> Iterator[Daemon]:
    """A daemon with a tier that has taken the chunks of an engine."""
    with daemon_left_clean("--tier", TIER) as tiered_daemon:
        with Engine(tiered_daemon.runtime_dir) as engine:
            keys = keys_of("tier figures", CHUNKS)
            engine.wait_attached().store(keys)
            wait_hit(engine, keys)

            def kept() -> bool:
                engine.load(keys)  # so that they are asked for
                return bool(tier_of(tiered_daemon)["counters"]["puts"]["ok"] == CHUNKS)

            eventually(kept)
        yield tiered_daemon


def tier_of(tiered_daemon: Daemon) -> dict[str, Any]:
    """The report of its only tier."""
    (tier,) = tiered_daemon.status()["tiers"]
    found: dict[str, Any] = tier
    return found


def test_the_commands_tell_of_a_tier(tiered_daemon: Daemon) -> None:
    """A row in status, a section in top, a line of the self-test."""
    run_dir = str(tiered_daemon.runtime_dir)
    told = run_kvd("status", "--runtime-dir", run_dir).stdout
    assert "memory" in told
    assert size(64 * 2**20) in told
    assert f"memory is {TIER}, pid {tier_of(tiered_daemon)['pid']}" in told
    command = ("top", "--once", "--interval", "0.1", "--runtime-dir", run_dir)
    assert "Tiers, the last minute" in run_kvd(*command).stdout
    # The host alone: the double of CUDA's driver may be in this process.
    command = ("selftest", "--device", "host", "--json", "--runtime-dir", run_dir)
    tested = eventually(lambda: run_kvd(*command), lambda tested: tested.returncode == 0)
    (tier,) = json.loads(tested.stdout)["tiers"]
    assert (tier["name"], tier["ok"], tier["stored"]) == ("memory", True, CHUNKS)


KEYS = keys_of("figures", 20)


def test_figures_of_events_are_the_same_everywhere(start_daemon: StartDaemon) -> None:
    """Report, metrics and commands show what an engine has published."""
    daemon = start_daemon()
    with Engine(daemon.runtime_dir, events=True).wait_attached() as engine:
        for at in range(0, len(KEYS), 10):
            engine.store(KEYS[at : at + 10])
        wait_hit(engine, KEYS)
        stored: set[bytes] = set()

        def published() -> bool:
            stored.update(engine.scheduler.take_changes(2 * len(KEYS)).stored)
            return stored == set(KEYS)

        eventually(published)
        report = eventually(
            daemon.status,
            lambda report: report["engines"][0]["published"]["kv_events"] == len(KEYS),
        )
        assert report["counters"]["kv_events"] == len(KEYS)
        (namespace,) = report["namespaces"]
        assert namespace["changes"] == len(KEYS)
        with over_unix(daemon) as client:
            scrape = eventually(  # which the broker may have been late for
                lambda: Scrape(client.get("/metrics").text),
                lambda scrape: scrape.total("kvd_namespace_changes_total") == len(KEYS),
            )
        assert scrape.total("kvd_engine_kv_events_total") == len(KEYS)
        assert scrape.total("kvd_kv_events_total") == len(KEYS)
        for command in (("status",), ("top", "--once", "--interval", "0.1")):
            shown = run_kvd(*command, "--runtime-dir", str(daemon.runtime_dir)).stdout
            assert "late at most" in shown
