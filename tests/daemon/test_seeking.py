"""A scheduler that waits for chunks from a tier in an event loop, beside one that did not ask."""

import select
from pathlib import Path

from kvd_client import NO_TIER, LookupResult
from tests.conftest import StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.serving import wait_state
from tests.waiting import PATIENCE, eventually

HIT, MISS = LookupResult.HIT, LookupResult.MISS


def test_who_seeks_a_chunk_is_woken_when_it_is_there(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """And another engine of the same model finds it as well."""
    tier = f"disk:{tmp_path / 'slabs'},size=64MiB,keep=all,late=5"
    daemon = start_daemon("--tier", tier, cpu_bytes="1MiB")
    (key,) = keys = keys_of("k", 1)
    with (
        Engine(daemon.runtime_dir, world_size=1).wait_attached() as engine,
        Engine(daemon.runtime_dir, world_size=1, name="other").wait_attached() as other,
    ):
        scheduler = engine.scheduler
        eventually(lambda: scheduler.tier_status(0), lambda status: status and status.usable)
        engine.store(keys)
        wait_hit(engine, keys)
        assert [tier.medium for tier in scheduler.tiers] == ["disk"]
        eventually(lambda: scheduler.find_tier(key), lambda number: number == 0)
        flood = iter(range(10_000))
        while scheduler.lookup(key) is not MISS:
            engine.store(keys_of(f"flood-{next(flood)}", 8), must=False)
        wait_state(daemon, writing=0)
        poll = select.poll()
        poll.register(scheduler.fileno(), select.POLLIN)
        eventually(lambda: not (scheduler.take_ready() or poll.poll(0)))  # of what was stored
        told = 0

        def is_there() -> bool:
            nonlocal told
            told += scheduler.request_promotion(keys)  # once more where the tier was late
            return scheduler.lookup(key) is HIT

        eventually(is_there)
        assert told
        assert poll.poll(PATIENCE * 1000), "the scheduler was not woken"
        assert other.scheduler.lookup(key) is HIT
        assert engine.load(keys) == other.load(keys) == (1, 0)
        assert scheduler.find_tier(b"unheard of") == NO_TIER
