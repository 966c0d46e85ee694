"""Break everything at random while engines work, and look whether all promises hold.

    make soak SECONDS=1800 SEED=7

The last line of the output is JSON; see docs/testing.md.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.injections import INJECTIONS, Skip
from tests.chaos.invariants import Invariants
from tests.chaos.plan import Action, Step, plan
from tests.chaos.shared import Count, Phase
from tests.chaos.world import World, place
from tests.waiting import eventually

KEEP = Path("build/soak")
ENOUGH = 30  # violations, after which a run has shown what it can
WARM_SECONDS = 0.3


class Run:
    """One run over a world."""

    def __init__(self, world: World, only: str = "") -> None:
        self.world = world
        self._weights = {kind: each.weight for kind, each in INJECTIONS.items() if only in kind}
        self.invariants = Invariants(world)
        self.steps = 0

    def go(self, seconds: float) -> None:
        """Steps until the time is out."""
        world = self.world
        world.now_doing = "at the start"
        world.revive()
        self.invariants.look()
        eventually(lambda: world.total(Count.VERIFIED_BYTES, world.ranks()))
        end = time.monotonic() + seconds  # from here on: on a busy machine all start slowly
        for step in plan(world.seed, self._weights):
            if time.monotonic() >= end or len(world.violations) >= ENOUGH:
                break
            self.steps = step.number
            world.now_doing = str(step)
            before = len(world.violations)
            self._step(step)
            self.invariants.look()
            if len(world.violations) > before:
                print(f"  plan: {step}", flush=True)
        world.now_doing = "at the end"
        world.phase[0] = Phase.END
        for client in world.clients.values():
            if not client.end():
                world.violated(f"{client.name} does not end")
            elif client.status:
                world.violated(f"{client.name} ended with status {client.status}")
        self.invariants.nothing_lent()

    def _step(self, step: Step) -> None:
        """The actions, each undone when its time is over; all undone at the end."""
        time.sleep(WARM_SECONDS)
        undoing: list[tuple[float, Callable[[], None]]] = []
        for action in step.actions:
            self._until(time.monotonic() + action.delay, undoing)
            undo = self._inject(action)
            undoing.append((time.monotonic() + action.hold, undo))
        self._until(float("inf"), undoing)

    def _until(self, when: float, undoing: list[tuple[float, Callable[[], None]]]) -> None:
        """Wait until then, undoing what is due meanwhile; `inf`: until all is undone."""
        while undoing:
            undoing.sort(key=lambda each: each[0])
            due, undo = undoing[0]
            if due > when:
                break
            time.sleep(max(0.0, due - time.monotonic()))
            undoing.pop(0)
            undo()
        if when != float("inf"):
            time.sleep(max(0.0, when - time.monotonic()))

    def _inject(self, action: Action) -> Callable[[], None]:
        try:
            undo = INJECTIONS[action.kind].inject(self.world, action)
        except Skip as reason:
            self.world.skipped[action.kind] = str(reason)
            return lambda: None
        self.world.injected[action.kind] += 1
        return undo

    def close(self) -> None:
        """End every process."""
        for client in self.world.clients.values():
            if client.starts:
                self.world.thaw(client.pid)
                client.end(signal.SIGKILL)
        self.world.daemon.end(signal.SIGKILL)

    def report(self, seconds: float) -> dict[str, object]:
        """As one JSON object."""
        world = self.world
        ranks, schedulers = world.ranks(), world.schedulers()
        longest = max(c.counters[Count.LONGEST_NS] for c in world.clients.values())
        return {
            "seconds": round(seconds, 1),
            "seed": world.seed,
            "steps": self.steps,
            "injected": dict(sorted(world.injected.items())),
            "skipped": world.skipped,
            "verified_bytes": world.total(Count.VERIFIED_BYTES, ranks),
            "untouched_bytes": world.total(Count.UNTOUCHED_BYTES, ranks),
            "stores": world.total(Count.STORES, ranks),
            "loads": world.total(Count.LOADS, ranks),
            "failed_jobs": world.total(Count.MISSES, ranks),
            "voided_stores": world.total(Count.VOIDED, ranks),
            "refused_full": world.total(Count.FULL, schedulers),
            "most_pinned": max(c.counters[Count.PINNED] for c in schedulers),
            "calls": world.total(Count.CALLS, [*ranks, *schedulers]),
            "step_calls": world.total(Count.STEP_CALLS, [*ranks, *schedulers]),
            "longest_step_call_ms": round(longest / 1e6, 1),
            "loads_beside_a_frozen_broker": world.frozen_loads,
            "daemons": world.daemon.starts,
            "clients": sum(client.starts for client in world.clients.values()),
            "slowest_recovery_seconds": round(self.invariants.most_recovery, 1),
            "slowest_quiet_seconds": round(self.invariants.most_quiet, 1),
            "violations": len(world.violations),
            "first_violations": world.violations[:10],
        }


def soak(seconds: float, seed: int, only: str = "") -> dict[str, object]:
    """One run; its report. Logs are kept under build/soak where something is wrong.

    Args:
        seconds: from the first step, after which none begins.
        seed: of the plan.
        only: kinds whose name has this text; empty for all.
    """
    began = time.monotonic()
    with place() as (folder, pool_dir, may_fill):
        run = Run(World(seed, folder, pool_dir, may_fill=may_fill), only)
        try:
            run.go(seconds)
        finally:
            run.close()
            if run.world.violations:
                kept = KEEP / f"seed-{seed}"
                shutil.rmtree(kept, ignore_errors=True)
                kept.mkdir(parents=True)
                for log in folder.glob("*.log"):
                    shutil.copy(log, kept)
                print(f"logs: {kept}", flush=True)
        return run.report(time.monotonic() - began)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seconds", type=float, nargs="?", default=1800.0)
    parser.add_argument("seed", type=int, nargs="?", default=None)
    parser.add_argument("--only", default="", help="kinds whose name has this text")
    chosen = parser.parse_args()
    if not any(chosen.only in kind for kind in INJECTIONS):
        parser.error(f"--only {chosen.only}: no such kind; there are {', '.join(INJECTIONS)}")
    seed = random.SystemRandom().randrange(2**31) if chosen.seed is None else chosen.seed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # whoever is ended ends what it started
    print(f"seed {seed}, {chosen.seconds:g} s", flush=True)
    report = soak(chosen.seconds, seed, chosen.only)
    print(json.dumps(report))
    return 1 if report["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
