"""Are routers told exactly what is cached, whatever happens?

    make events-exact PASSES=20 SEED=7

Four engines of two models store, and evict each other's chunks, while something is done to them.
When all is quiet each router's index, which knows only what engines have published, is compared
with the directory, key for key: Dynamo's real indexer, llm-d's index rebuilt from its source, and a
plain set; and so is what each engine's scheduler was told. Every line of the output is JSON.
"""

import json
import random
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass

from tests import long_runs
from tests.daemon.serving import run_kvd
from tests.long_runs import Report, command_line
from tests.processes import frozen, kill_and_wait
from tests.routers.world import CONFIG, EVERYTHING, WITH_TIER, World, made
from tests.waiting import eventually

CHURN = 300  # changes in each model's ring before something is done, and after it
RING = int(CONFIG["change-ring"])
LATE = "late"


def _clear(world: World, *arguments: str) -> None:
    where = str(world.daemon.runtime_dir)
    done = run_kvd("clear", "--runtime-dir", where, "--yes", *arguments)
    assert done.returncode == 0, done.stderr


def _end_engine(world: World) -> None:
    """End an engine while routers come that have heard nothing yet."""
    world.remove_routers(LATE)
    world.add_routers(LATE)
    world.end_engine("d")


def _lose_messages(world: World) -> None:
    """Let all routers but those that hear everything lose what is published for a while."""
    losing = [each for name, each in world.subscribers.items() if name != EVERYTHING]
    for drops in (True, False):
        for subscriber in losing:
            subscriber.pump()
            subscriber.drops = drops
        if drops:
            world.churn(CHURN)


def _stop_engine(world: World) -> None:
    """An engine stands still while the ring that it reads is overwritten; it says so after."""
    world.start_engines()  # the other engine of the model goes on storing
    engine = world.engines["a"]

    def overruns() -> int:
        engines = eventually(world.daemon.report)["engines"]
        (status,) = (each for each in engines if each["name"] == engine.spec.name)
        return int(status["published"]["kv_event_overruns"])

    before = overruns()
    with frozen(engine.pid):
        world.churn(RING + 1)
    eventually(lambda: overruns() > before)


def _stop_tier(world: World) -> None:
    with frozen(world.tier_pid()):
        world.churn(CHURN)


def reset_own_cache(world: World) -> None:
    """An engine that repeats nothing resets its own prefix cache, and kvd's stays."""
    world.start_engines()
    world.engines["d"].ask("reset own cache")


def restart(world: World, *flags: str) -> None:
    """Kill the broker; another starts."""
    world.daemon.finish(signal.SIGKILL)
    world.start_daemon(*flags)


DONE: dict[str, Callable[[World], object]] = {
    "nothing": lambda world: world.churn(CHURN),
    "kvd clear of one model": lambda world: _clear(world, "--namespace", "left"),
    "kvd clear": _clear,
    "reset by an engine": lambda world: world.engines["c"].ask("reset"),
    "reset of an engine's own cache": reset_own_cache,
    "kill -9 of an engine": lambda world: world.end_engine("b", kill=True),
    "the engine comes back": World.start_engines,
    "an engine leaves, routers come late": _end_engine,
    "another engine comes": World.start_engines,
    "routers lose messages": _lose_messages,
    "kill -9 of the lane": lambda world: kill_and_wait(eventually(world.daemon.lane_pids)[0]),
    "an engine stands still, its ring overruns": _stop_engine,
    "kill -9 of the broker, warm restart": restart,
    "kill -9 of the broker, cold restart": lambda world: restart(world, "--cold"),
}
"""What is done while engines store, by its name."""


DONE_BELOW: dict[str, Callable[[World], object]] = {
    "kill -9 of the tier, whose chunks go": lambda world: kill_and_wait(world.tier_pid()),
    "the tier stands still": _stop_tier,
}
"""And where there is a tier."""


@dataclass(frozen=True, slots=True)
class Row:
    """What was done, and what the indexes had when all was quiet."""

    done: str
    chunks: int  # that all directories had in memory
    in_tiers: int  # chunks that their tiers held
    changes: int  # that their rings had meanwhile, at least
    events: int  # that were published meanwhile
    differences: dict[str, int]  # keys, by kind of index
    seconds: float  # until there was no difference, or the wait for that was over


def one(world: World, name: str) -> Row:
    """Do one thing while engines store, and compare when all is quiet."""
    world.tell_all("run")
    changes = world.changes
    world.churn(CHURN)
    events = world.subscribers[EVERYTHING].events
    (DONE | DONE_BELOW)[name](world)
    world.churn(CHURN)
    world.fill_tiers()
    world.tell_all("rest")
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
        in_tiers=sum(len(each.tier_keys) for each in expected),
        changes=world.changes - changes,
        events=world.subscribers[EVERYTHING].events - events,
        differences=differences,
        seconds=round(seconds, 2),
    )


def exactness(passes: int, seed: int, done: Collection[str], *, tier: bool = False) -> list[Row]:
    """Do all of this, as often as asked for; after the first pass in an order by chance."""
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
    parser = command_line(__doc__, 1)
    parser.add_argument("--tier", action="store_true", help="the daemon has a tier")
    chosen = parser.parse_args()

    def run() -> Report:
        done = DONE | DONE_BELOW if chosen.tier else DONE
        rows = exactness(chosen.amount, chosen.seed, done, tier=chosen.tier)
        wrong = [asdict(row) for row in rows if any(row.differences.values())]
        changes = sum(row.changes for row in rows)
        return {"rows": len(rows), "changes": changes, "violations": wrong}

    return long_runs.main(chosen, run)


if __name__ == "__main__":
    sys.exit(main())
