"""Are routers told exactly what is cached, whatever happens?

    make events-exact PASSES=20 SEED=7

Four engines of two models store, and evict each other's chunks, while something is done to them.
When all is quiet each router's index, which knows only what engines have published, is compared
with the directory, key for key: Dynamo's real indexer, llm-d's index rebuilt from its source, and a
plain set; and so is what each engine's scheduler was told. Every line of the output is JSON.
"""

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from tests.daemon.serving import run_kvd
from tests.processes import frozen, kill_and_wait
from tests.routers.world import CONFIG, EVERYTHING, WITH_TIER, World, made
from tests.waiting import eventually

CHURN = 300  # changes in each model's ring before something is done, and after it
RING = int(CONFIG["change-ring"])
LATE = "late"
Do = Callable[[World], None]


def _nothing(world: World) -> None:
    world.churn(CHURN)


def _clear(*arguments: str) -> Do:
    def clear(world: World) -> None:
        where = str(world.daemon.runtime_dir)
        done = run_kvd("clear", "--runtime-dir", where, "--yes", *arguments)
        assert done.returncode == 0, done.stderr

    return clear


def _reset(world: World) -> None:
    world.engines["c"].tell("reset")


def _kill_engine(world: World) -> None:
    world.end_engine("b", kill=True)


def _end_engine(world: World) -> None:
    """End an engine while routers come that have heard nothing yet."""
    world.remove_routers(LATE)
    world.add_routers(LATE)
    world.end_engine("d")


def _start_engines(world: World) -> None:
    world.start_engines()


def _lose_messages(world: World) -> None:
    """Let all routers but those that hear everything lose what is published for a while."""
    with ExitStack() as stack:
        for name, subscriber in world.subscribers.items():
            if name != EVERYTHING:
                stack.enter_context(subscriber.dropping())
        world.churn(CHURN)


def _kill_lane(world: World) -> None:
    kill_and_wait(eventually(world.daemon.lane_pids)[0])


def _overrun(world: World, pid: int, who: Callable[[World], int]) -> None:
    """A process stands still while the rings that it reads are overwritten; it says so after."""
    before = who(world)
    with frozen(pid):
        world.churn(RING + 1)
    eventually(lambda: who(world) > before)


def _kill_tier(world: World) -> None:
    kill_and_wait(world.tier_pid())


def _stop_tier(world: World) -> None:
    with frozen(world.tier_pid()):
        world.churn(CHURN)


def _stop_engine(world: World) -> None:
    world.start_engines()  # the other engine of the model goes on storing
    engine = world.engines["a"]

    def overruns(world: World) -> int:
        engines = eventually(world.daemon.report)["engines"]
        (found,) = (each for each in engines if each["name"] == engine.spec.name)
        return int(found["published"]["kv_event_overruns"])

    _overrun(world, engine.pid, overruns)


def _restart(*, cold: bool = False) -> Do:
    def restart(world: World) -> None:
        world.daemon.finish(signal.SIGKILL)
        world.start_daemon(cold=cold)

    return restart


DONE: dict[str, Do] = {
    "nothing": _nothing,
    "kvd clear of one model": _clear("--namespace", "left"),
    "kvd clear": _clear(),
    "reset by an engine": _reset,
    "kill -9 of an engine": _kill_engine,
    "the engine comes back": _start_engines,
    "an engine leaves, routers come late": _end_engine,
    "another engine comes": _start_engines,
    "routers lose messages": _lose_messages,
    "kill -9 of the lane": _kill_lane,
    "an engine stands still, its ring overruns": _stop_engine,
    "kill -9 of the broker, warm restart": _restart(),
    "kill -9 of the broker, cold restart": _restart(cold=True),
}
"""What is done while engines store, by its name."""


DONE_BELOW: dict[str, Do] = {
    "kill -9 of the tier, whose chunks go": _kill_tier,
    "the tier stands still": _stop_tier,
}
"""And where there is a tier."""


@dataclass(frozen=True, slots=True)
class Row:
    """What was done, and what the indexes had when all was quiet.

    Attributes:
        done: its name.
        chunks, blocks: that all directories had in memory.
        in_tiers: chunks that their tiers held.
        changes: that their rings had meanwhile, at least.
        events: that were published meanwhile.
        differences: keys, by kind of index.
        seconds: until there was no difference, or the wait for that was over.
    """

    done: str
    chunks: int
    blocks: int
    in_tiers: int
    changes: int
    events: int
    differences: dict[str, int]
    seconds: float


def one(world: World, name: str) -> Row:
    """Do one thing while engines store, and compare when all is quiet."""
    world.run()
    changes = world.changes
    world.churn(CHURN)
    events = world.subscribers[EVERYTHING].events
    (DONE | DONE_BELOW)[name](world)
    world.churn(CHURN)
    world.fill_tiers()
    world.rest()
    began = time.monotonic()
    try:
        differences = eventually(world.quiet_differences, lambda found: not any(found.values()))
    except AssertionError:
        differences = world.differences()
    seconds = time.monotonic() - began
    expected = world.expected().values()
    return Row(
        done=name,
        chunks=sum(len(each.keys) for each in expected),
        blocks=sum(len(each.plain) for each in expected),
        in_tiers=sum(len(each.in_tiers.keys) for each in expected),
        changes=world.changes - changes,
        events=world.subscribers[EVERYTHING].events - events,
        differences=differences,
        seconds=round(seconds, 2),
    )


def exactness(passes: int, seed: int, done: Collection[str], *, tier: bool = False) -> list[Row]:
    """All of this, as often as asked for; after the first pass in an order by chance.

    Args:
        passes: how often.
        seed: of engines and order.
        done: its names.
        tier: the daemon has one.
    """
    rows = []
    chance = random.Random(seed)
    with made(seed, WITH_TIER if tier else CONFIG) as world:
        world.start_daemon()
        world.add_routers(EVERYTHING)
        world.start_engines()
        for number in range(passes):
            names = list(done)
            if number:
                chance.shuffle(names)
            for name in names:
                rows.append(one(world, name))
                print(json.dumps(asdict(rows[-1])), flush=True)
        for subscriber in world.subscribers.values():
            assert not subscriber.errors, subscriber.errors
    return rows


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("passes", type=int, nargs="?", default=1)
    parser.add_argument("seed", type=int, nargs="?", default=None)
    parser.add_argument("--tier", action="store_true", help="the daemon has a tier")
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if chosen.seed is None else chosen.seed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what it started
    print(json.dumps({"seed": seed, "passes": chosen.passes}), flush=True)
    done = DONE | DONE_BELOW if chosen.tier else DONE
    rows = exactness(chosen.passes, seed, done, tier=chosen.tier)
    wrong = [asdict(row) for row in rows if any(row.differences.values())]
    total = {"rows": len(rows), "changes": sum(row.changes for row in rows), "wrong": wrong}
    print(json.dumps(total))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
