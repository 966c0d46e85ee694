"""What is told of KV events: in the report, in metrics and in the commands' words."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.conftest import StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.serving import run_kvd
from tests.http.serving import Scrape, over_unix
from tests.waiting import eventually

KEYS = keys_of("figures", 20)


def told(part: Any) -> int:
    """Changes that an engine or the publisher has published."""
    count: int = part["published"]["kv_events"]
    return count


def test_figures_of_events_are_the_same_everywhere(
    start_daemon: StartDaemon, runtime_dir: Path
) -> None:
    """Report, metrics and commands say what was published, also after the publisher was lost."""
    daemon = start_daemon("--events", f"ipc://{runtime_dir}/events.sock")
    with Engine(daemon.runtime_dir, events=True).wait_attached() as engine:
        for at in range(0, len(KEYS), 10):
            engine.store(KEYS[at : at + 10])
        wait_hit(engine, KEYS)
        taken = engine.scheduler.take_changes(2 * len(KEYS))
        assert taken.stored.keys() == set(KEYS)
        report = eventually(
            daemon.status,
            lambda said: told(said["publisher"]) == told(said["engines"][0]) == len(KEYS),
        )
        (namespace,) = report["namespaces"]
        assert namespace["changes"] == len(KEYS)
        assert report["counters"]["kv_events"] == 2 * len(KEYS)
        with over_unix(daemon) as client:
            scrape = Scrape(client.get("/metrics").text)
        assert scrape.get("kvd_publisher_up") == 1
        assert scrape.total("kvd_namespace_changes_total") == len(KEYS)
        assert scrape.total("kvd_engine_kv_events_total") == len(KEYS)
        for command in (("status",), ("top", "--once", "--interval", "0.1")):
            assert "late at most" in run_kvd(*command, "--runtime-dir", str(runtime_dir)).stdout
        before = report["publisher"]["pid"]
        os.kill(before, signal.SIGKILL)
        report = eventually(
            daemon.status,
            lambda said: said["publisher"]["pid"] not in {0, before} and said["publisher"]["up"],
        )
        assert report["publisher"]["restarts"] == 1
        assert told(report["publisher"]) >= len(KEYS)
