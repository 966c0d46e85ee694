"""A scheduler that waits for chunks from a tier in an event loop, beside one that did not ask."""

import select

from kvd_client import NOT_BELOW, LookupResult
from tests.conftest import StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.waiting import PATIENCE, eventually

HIT, MISS = LookupResult.HIT, LookupResult.MISS


def test_who_seeks_a_chunk_is_woken_when_it_is_there(start_daemon: StartDaemon) -> None:
    """And another engine of the same model finds it as well."""
    daemon = start_daemon("--tier", "memory:,size=64MiB,keep=all,late=5", cpu_bytes="1MiB")
    (key,) = keys = keys_of("k", 1)
    with (
        Engine(daemon.runtime_dir, world_size=1).wait_attached() as engine,
        Engine(daemon.runtime_dir, world_size=1, name="other").wait_attached() as other,
    ):
        scheduler = engine.scheduler
        eventually(lambda: scheduler.tier_status(0), lambda status: status and status.usable)
        engine.store(keys)
        wait_hit(engine, keys)
        assert [tier.medium for tier in scheduler.tiers] == ["memory"]
        eventually(lambda: scheduler.below(key), lambda number: number == 0)
        flood = iter(range(10_000))
        while scheduler.lookup(key) is not MISS:
            engine.store(keys_of(f"flood-{next(flood)}", 8), must=False)
        poll = select.poll()
        poll.register(scheduler.fileno(), select.POLLIN)
        assert scheduler.seek(keys) == 1
        assert scheduler.seek(keys) == 0
        while scheduler.lookup(key) is not HIT:
            assert poll.poll(PATIENCE * 1000), "the scheduler was not woken"
            scheduler.take_ready()
        assert other.scheduler.lookup(key) is HIT
        assert engine.load(keys) == other.load(keys) == (1, 0)
        assert scheduler.below(b"unheard of") == NOT_BELOW
