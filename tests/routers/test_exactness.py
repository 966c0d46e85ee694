"""KV events say exactly what is cached: a short run of `make events-exact`, with a tier."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine_answers import TEST_SECONDS
from tests.processes import kill_and_wait
from tests.routers.exactness import (
    CHURN,
    DONE,
    DONE_BELOW,
    exactness,
    reset_own_cache,
    restart,
)
from tests.routers.world import CONFIG, EVERYTHING, World, made
from tests.waiting import eventually

LEFT_TO_NIGHTS = (
    "kvd clear",
    "reset by an engine",
    "kill -9 of the lane",
    "an engine stands still, its ring overruns",
)


@pytest.mark.timeout(TEST_SECONDS)
def test_indexes_fed_with_published_bytes_equal_the_directory() -> None:
    """Whatever is done, all indexes and schedulers have the directory's keys, and no other."""
    done = [name for name in DONE | DONE_BELOW if name not in LEFT_TO_NIGHTS]
    for row in exactness(1, 2026, done, tier=True):
        assert not any(row.differences.values()), row
        assert row.chunks, row
        assert row.events, row
        assert row.in_tiers, row


def kill_tier(world: World) -> None:
    """Return when another process has replaced the tier's."""
    pid = world.tier_pid()
    kill_and_wait(pid)
    eventually(world.tier_pid, pid.__ne__)


def be_away(world: World) -> None:
    """The daemon is away for so long that engines remove all that they have published."""
    world.daemon.finish(signal.SIGKILL)
    eventually(lambda: not any(blocks_on_disk(world).values()))
    world.start_daemon()


def blocks_on_disk(world: World) -> dict[int, set[int]]:
    """Return what Dynamo has of each engine on disk: blocks with tokens."""
    dump = world.indexers[EVERYTHING].dump_blocks()
    return {
        engine.spec.instance: {
            number for tier, number in dump.get(engine.spec.instance, ()) if tier == "disk"
        }
        for engine in world.running()
    }


def rest(world: World) -> None:
    """Let engines store no more; return when routers know what is cached."""
    world.tell_all("rest")
    eventually(world.quiet_differences, lambda differences: not any(differences.values()))


@pytest.mark.timeout(TEST_SECONDS)
def test_tokens_of_chunks_that_a_tier_alone_has_are_published_again(tmp_path: Path) -> None:
    """After resets of an engine's own cache, and ends of tier and daemon that engines outlive."""
    again: list[Callable[[World], None]] = [reset_own_cache, kill_tier, restart, be_away]
    with made(2026, CONFIG | {"tier": f"disk:{tmp_path}/tier,size=64MiB,keep=all"}) as world:
        world.start_daemon()
        world.add_routers(EVERYTHING)
        world.start_engines()
        world.churn(4 * CHURN)
        world.fill_tiers()
        rest(world)
        before, expected = blocks_on_disk(world), world.expected()
        assert all(before.values())
        assert all(model.tier_keys - model.keys for model in expected.values())
        for act in again:
            act(world)
            rest(world)
            after = eventually(
                lambda: blocks_on_disk(world),
                lambda after: all(before[engine] <= after[engine] for engine in before),
            )
            assert after.keys() == before.keys(), act
