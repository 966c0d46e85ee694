"""The report of a daemon that has worked: documented, and its figures agree with each other."""

from collections.abc import Iterator

import pytest

from kvd.metrics.counts import STAGES
from kvd.wire.tool import ToolConnection
from kvd_client import LookupResult
from kvd_proto.messages import Drain, Resume
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, make_layout
from tests.daemon.serving import wait_state
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


def test_events_tell_of_engines_and_ranks(daemon: Daemon, engine: Engine) -> None:
    """Who came, attached and went is in the report, numbered, with names for people."""
    pid = engine.scheduler.status()["engines"][0]["sessions"][0]["pid"]
    assert len(engine.begin(keys_of("half", 3)).keys) == 3
    wait_state(daemon, writing=3)
    engine.workers[1].close()
    report = eventually(daemon.status, lambda report: not report["engines"][0]["attached"])
    texts = [event["text"] for event in report["events"]]
    assert f"engine engine rank 1 (pid {pid}) has unregistered; 3 chunks in writing freed" in texts
    assert any(text.startswith("engine engine attached to namespace") for text in texts)
    numbers = [event["number"] for event in report["events"]]
    assert numbers == list(range(1, len(numbers) + 1))
    times = [event["time"] for event in report["events"]]
    assert times == sorted(times)
    assert report["started"] <= times[0] <= report["time"]
