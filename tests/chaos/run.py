"""Break everything at random while engines work, and look whether all promises hold.

    make soak SECONDS=1800 SEED=7

The last line of the output is JSON; see docs/testing.md.
"""

import shutil
import sys
import time
from pathlib import Path

from tests import long_runs
from tests.chaos.injections import INJECTIONS, Action, Skip, Undo, plan
from tests.chaos.invariants import Invariants
from tests.chaos.shared import Count, Phase
from tests.chaos.world import World, made
from tests.long_runs import Report, command_line
from tests.waiting import eventually

KEEP = Path("build/soak")
ENOUGH = 30  # violations, after which a run has shown what it can
WARM_SECONDS = 0.3


def break_all(world: World, invariants: Invariants, seconds: float, seed: int, only: str) -> int:
    """Steps until the time is out; how many."""
    world.revive()
    invariants.look()
    eventually(lambda: world.total(Count.VERIFIED_BYTES))
    end = time.monotonic() + seconds  # from here on: on a busy machine all start slowly
    steps = 0
    for actions in plan(seed, [kind for kind in INJECTIONS if only in kind]):
        if time.monotonic() >= end or len(world.violations) >= ENOUGH:
            break
        steps += 1
        world.now_doing = f"step {steps}: {', '.join(map(str, actions))}"
        _inject_all(world, actions)
        invariants.look()
    world.now_doing = "at the end"
    world.phase[0] = Phase.END
    for client in world.clients.values():
        if not client.end():
            world.violated(f"{client.name} does not end")
        elif client.status:
            world.violated(f"{client.name} ended with status {client.status}")
    invariants.nothing_lent()
    return steps


def _inject_all(world: World, actions: list[Action]) -> None:
    """The actions, each undone when its time is over; all undone at the end."""
    time.sleep(WARM_SECONDS)
    undoing: list[tuple[float, Undo]] = []
    for action in actions:
        begin = time.monotonic() + action.delay
        _undo(undoing, begin)
        time.sleep(max(0.0, begin - time.monotonic()))
        try:
            undo = INJECTIONS[action.kind].inject(world, action)
        except Skip as reason:
            world.skipped[action.kind] = str(reason)
        else:
            world.injected[action.kind] += 1
            undoing.append((time.monotonic() + action.hold, undo))
    _undo(undoing)


def _undo(undoing: list[tuple[float, Undo]], until: float = float("inf")) -> None:
    """Undo, each at its time, what is due until then."""
    undoing.sort(key=lambda item: item[0])
    while undoing and undoing[0][0] <= until:
        due, undo = undoing.pop(0)
        time.sleep(max(0.0, due - time.monotonic()))
        undo()


def soak(seconds: float, seed: int, only: str = "") -> Report:
    """One run with kinds whose name has this text; its report.

    No step begins so many seconds after the first one. Logs are kept under build/soak where
    something is wrong.
    """
    with made(seed) as world:
        invariants = Invariants(world)
        try:
            steps = break_all(world, invariants, seconds, seed, only)
        finally:
            if world.violations:
                logs = KEEP / f"seed-{seed}"
                shutil.rmtree(logs, ignore_errors=True)
                logs.mkdir(parents=True)
                for log in world.folder.glob("*.log"):
                    shutil.copy(log, logs)
                print(f"logs: {logs}", flush=True)
        return {
            "steps": steps,
            "injected": dict(sorted(world.injected.items())),
            "skipped": world.skipped,
            "verified_bytes": world.total(Count.VERIFIED_BYTES),
            "untouched_bytes": world.total(Count.UNTOUCHED_BYTES),
            "stores": world.total(Count.STORES),
            "loads": world.total(Count.LOADS),
            "failed_jobs": world.total(Count.MISSES),
            "repeated_stores": world.total(Count.REPEATED),
            "calls": world.total(Count.CALLS),
            "daemons": world.daemon.starts,
            "clients": sum(client.starts for client in world.clients.values()),
            "slowest_recovery_seconds": round(invariants.most_recovery, 1),
            "violations": len(world.violations),
            "first_violations": world.violations[:10],
        }


def main() -> int:
    """The command line."""
    parser = command_line(__doc__, 1800.0)
    parser.add_argument("--only", default="", help="kinds whose name has this text")
    chosen = parser.parse_args()
    if not any(chosen.only in kind for kind in INJECTIONS):
        parser.error(f"--only {chosen.only}: no such kind; there are {', '.join(INJECTIONS)}")
    return long_runs.main(chosen, lambda: soak(chosen.amount, chosen.seed, chosen.only))


if __name__ == "__main__":
    sys.exit(main())
