"""What operators see of a daemon's tiers: in the report, in its commands, in the metrics."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvd.metrics.reading import size
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.serving import DOUBLES, Daemon, daemon_left_clean, run_kvd
from tests.waiting import eventually

TIER = "memory:,size=64MiB,late=30"
CHUNKS = 8


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon with a tier that has taken the chunks of an engine."""
    with daemon_left_clean("--tier", TIER) as daemon:
        with Engine(daemon.runtime_dir) as engine:
            keys = keys_of("tier figures", CHUNKS)
            engine.wait_attached().store(keys)
            wait_hit(engine, keys)

            def kept() -> bool:
                engine.load(keys)  # so that they are asked for
                return bool(tier_of(daemon)["counters"]["puts"]["ok"] == CHUNKS)

            eventually(kept)
        yield daemon


def tier_of(daemon: Daemon) -> dict[str, Any]:
    """What the daemon reports of its only tier."""
    (tier,) = daemon.status()["tiers"]
    found: dict[str, Any] = tier
    return found


def test_the_report_has_a_tiers_state_and_figures(daemon: Daemon) -> None:
    """Bytes and chunks add up, the breaker is closed, and the setting is as it was written."""
    report = eventually(
        daemon.status, lambda report: report["ready"] and report["tiers"][0]["usable"]
    )
    (tier,) = report["tiers"]
    (space,) = report["namespaces"]
    assert (tier["name"], tier["setting"], tier["medium"]) == ("memory", TIER, "memory")
    assert (tier["state"], tier["breaker"], tier["usable"]) == ("up", "closed", True)
    assert tier["counters"]["put_bytes"] == CHUNKS * space["bytes_per_chunk"]
    assert tier["counters"]["put_seconds"] > 0
    assert sum(tier["counters"]["put_latency"]["counts"]) > 0
    assert space["tier_chunks"] == CHUNKS
    assert tier["total_bytes"] == 64 * 2**20
    assert not [each for each in report["conditions"] if each["name"].startswith("tier")]


def test_the_commands_tell_of_a_tier(daemon: Daemon) -> None:
    """A row in status, a section in top, a line of the self-test."""
    told = run_kvd("status", "--runtime-dir", str(daemon.runtime_dir)).stdout
    assert "memory" in told
    assert size(64 * 2**20) in told
    assert f"memory is {TIER}, pid {tier_of(daemon)['pid']}" in told
    command = ("top", "--once", "--interval", "0.1", "--runtime-dir", str(daemon.runtime_dir))
    assert "Tiers, the last minute" in run_kvd(*command).stdout
    # The host alone: the double of CUDA's driver may be in this process.
    command = ("selftest", "--device", "host", "--json", "--runtime-dir", str(daemon.runtime_dir))
    tested = eventually(lambda: run_kvd(*command), lambda tested: tested.returncode == 0)
    (tier,) = json.loads(tested.stdout)["tiers"]
    assert (tier["name"], tier["ok"], tier["stored"]) == ("memory", True, CHUNKS)


def test_the_doctor_knows_a_tier_without_a_disk(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier in memory has nothing to look at; it is said that its options are right."""
    monkeypatch.syspath_prepend(DOUBLES)
    told = ("--runtime-dir", str(daemon.runtime_dir), "--tier", TIER)
    found = json.loads(run_kvd("doctor", "--json", *told).stdout)["findings"]
    (tier,) = [each for each in found if each["name"] == "tier"]
    assert tier["level"] == "ok"
    assert tier["text"].startswith(TIER)
