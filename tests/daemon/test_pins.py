"""Pins that leave without an answer: they keep chunks, and hardly ever come too late."""

import itertools
import threading

from tests.conftest import StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.serving import wait_state

POOL = "1MiB"  # 64 chunks
BATCH = 4


def flood(engine: Engine, ended: threading.Event) -> None:
    """Store without end."""
    for turn in itertools.count():
        if ended.is_set():
            return
        engine.store(keys_of(f"flood-{turn}", BATCH), must=False)


def test_chunks_of_requests_that_wait_are_kept(start_daemon: StartDaemon) -> None:
    """Another engine stores three times what the pool holds before the load is sent."""
    daemon = start_daemon("--lease-seconds", "600", cpu_bytes=POOL)
    with (
        Engine(daemon.runtime_dir, world_size=1).wait_attached() as engine,
        Engine(daemon.runtime_dir, "other", world_size=1).wait_attached() as other,
    ):
        keys = keys_of("kept", 8)
        engine.store(keys)
        wait_hit(engine, keys)
        with engine.scheduler.prepare_load(keys, lease_seconds=600.0) as ticket:
            assert len(ticket) == 8
            wait_state(daemon, pinned=8)
            for turn in range(24):
                other.store(keys_of(f"flood-{turn}", 8))
            blocks = list(range(33, 49))
            engine.poison(blocks)
            jobs = engine.submit("load", [0], blocks, ticket.slots, ticket.generations)
            assert engine.results(jobs)[0].success
            assert engine.wrong_bytes(keys, blocks) == 0
        report = daemon.status()
        assert report["counters"]["evicted"] > 64
        assert report["counters"]["pins_late"] == 0
