"""What is reported of engines' KV events: in the status report, in metrics, by the commands."""

from tests.conftest import StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.serving import run_kvd
from tests.http.serving import Scrape, over_unix
from tests.waiting import eventually

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
