"""The table of what can be injected, and the plan of what is injected when.

To add a kind: one function, one line in `INJECTIONS`. A function gets the world and the planned
action, does its harm, and returns how to undo it, which is called after `action.hold` seconds, or
raises `Skip` where it cannot be done here.
"""

import contextlib
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests.chaos.shared import Count
from tests.chaos.world import Client, Config, World

T = TypeVar("T")
MOST_AT_ONCE = 3
LONGEST_LEAD = 1.2
LONGEST_HOLD = 2.0
DRAWS = 2
YEAR = 365 * 86_400
JUMPS = (-20 * YEAR, -86_400, -30, -1, 1, 30, 86_400, 20 * YEAR, 79 * YEAR, 100 * YEAR)
"""Seconds; 32 bits hold 80 years from now."""
CHANGES: tuple[Config, ...] = (
    {},
    {"cpu-bytes": "4MiB"},
    {"cpu-bytes": "16MiB", "policy": "lru"},
    {"policy": "lru"},
    {"keep-pool": "no"},
    {"lease-seconds": "1", "ticket-seconds": "0.5"},
    {"max-queued-jobs": "2"},
    {"max-queued-bytes": "128KiB"},
    {"reuse-threshold": "2"},
    {"max-leases": "3"},
    {"max-sessions": "14"},
    {"max-namespaces": "3"},
    {"log-level": "debug", "log-format": "json"},
    {"share-between-users": "no"},
)
"""What a restart may change of the usual configuration."""


@dataclass(frozen=True, slots=True)
class Action:
    """One injection."""

    kind: str  # a key of `INJECTIONS`
    delay: float  # seconds after the step's begin, or after the action before
    hold: float  # seconds until it is undone
    draws: tuple[float, ...]  # in [0, 1), from which the injection takes its choices

    def pick(self, choices: Sequence[T]) -> T:
        """One of the choices."""
        return choices[int(self.draws[0] * len(choices))]

    def __str__(self) -> str:
        return f"{self.kind} after {self.delay:.2f} s for {self.hold:.2f} s"


def plan(seed: int, kinds: Sequence[str]) -> Iterator[list[Action]]:
    """Steps without end: actions that overlap, after which all is undone; the seed decides them.

    Every kind comes once before chance alone decides, so that a short run has seen all.
    """
    chance = random.Random(seed)
    weights = [INJECTIONS[kind].weight for kind in kinds]
    first = chance.sample(kinds, len(kinds))
    while True:
        actions = []
        for _ in range(chance.randint(1, MOST_AT_ONCE)):
            kind = first.pop() if first else chance.choices(kinds, weights)[0]
            delay, hold = chance.uniform(0.0, LONGEST_LEAD), chance.uniform(0.05, LONGEST_HOLD)
            draws = tuple(chance.random() for _ in range(DRAWS))
            actions.append(Action(kind, delay, hold, draws))
        yield actions


Undo = Callable[[], object]
Inject = Callable[[World, Action], Undo]


class Skip(Exception):
    """This cannot be injected here; the text says why."""


# --------------------------------------------------- kill, freeze and restart


def _kill_lane(world: World, action: Action) -> Undo:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(action.pick(_lanes(world)), signal.SIGKILL)
    return lambda: None


def _kill_client(clients: Callable[[World], list[Client]]) -> Inject:
    def inject(world: World, action: Action) -> Undo:
        client = action.pick(clients(world))
        client.end(signal.SIGKILL)
        return lambda: None if client.running else client.start()

    return inject


def _stop(pids: Callable[[World], list[int]]) -> Inject:
    def inject(world: World, action: Action) -> Undo:
        pid = action.pick(pids(world))
        world.freeze(pid)
        return lambda: world.thaw(pid)

    return inject


def _restart(number: int, changes: Sequence[Config | None] = CHANGES) -> Inject:
    """By this signal, with one of these changes of the configuration."""

    def inject(world: World, action: Action) -> Undo:
        if number != signal.SIGKILL:
            world.thaw(world.daemon.pid)  # a frozen broker gets no other signal
        complaint = world.daemon.finish(number)
        if complaint:
            world.violated(complaint)
        change = action.pick(changes)
        return lambda: None if world.daemon.running else world.daemon.start(change)

    return inject


def _broker(world: World) -> list[int]:
    if not world.daemon.running:
        raise Skip("no broker ran at that moment")
    return [world.daemon.pid]


def _serving_broker(world: World) -> list[int]:
    """One that starts ends, and says so, where it may open no file."""
    if not world.daemon.serves:
        raise Skip("the broker did not serve yet at that moment")
    return _broker(world)


def _lanes(world: World) -> list[int]:
    lanes = world.daemon.lane_pids()
    if not lanes:
        raise Skip("no lane ran at that moment")
    return lanes


# ------------------------------------------------------------ nothing is left


def _starve(pids: Callable[[World], list[int]]) -> Inject:
    """A process may open hardly any descriptor more than it has."""

    def inject(world: World, action: Action) -> Undo:
        pid = action.pick(pids(world))
        more = 1 + int(action.draws[1] * 20)
        with contextlib.suppress(OSError):
            _limit(pid, len(list(Path(f"/proc/{pid}/fd").iterdir())) + more)

        def undo() -> None:  # lanes that were started meanwhile have inherited it
            for each in {pid, world.daemon.pid, *world.daemon.lane_pids()}:
                with contextlib.suppress(OSError):
                    _limit(each)

        return undo

    return inject


def _limit(pid: int, descriptors: int = 2**63 - 1) -> None:
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(most, descriptors), most))


def _fill_pool_dir(world: World, _: Action) -> Undo:
    """Not a page is left where the pool and the ledgers lie."""
    if not world.may_fill:
        raise Skip("this user may not mount a tmpfs, and nobody else's is filled")
    filler = world.pool_dir / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass

    return lambda: filler.unlink(missing_ok=True)


# ------------------------------------------------------------ pins and clocks


def _pin_everything(world: World, action: Action) -> Undo:
    """Every engine pins what it finds; half of the times it forgets the leases."""

    def pin(how: int) -> None:
        for client in world.schedulers():
            client.counters[Count.PIN] = how

    pin(1 + (action.draws[0] < 0.5))
    return lambda: pin(0)


def _jump_clock(world: World, action: Action) -> Undo:
    """Forward or back, by seconds or by decades; then back to where it was."""
    if world.clock.missing:
        raise Skip(world.clock.missing)
    world.clock.jump(action.pick(JUMPS))
    return lambda: world.clock.jump(0)


class Injection(NamedTuple):
    """One kind: what does it, and how often it comes relative to the others."""

    inject: Inject
    weight: float


INJECTIONS: dict[str, Injection] = {
    "kill broker": Injection(_restart(signal.SIGKILL, (None,)), 2),
    "stop broker": Injection(_stop(_broker), 3),
    "kill lane": Injection(_kill_lane, 2),
    "stop lane": Injection(_stop(_lanes), 2),
    "kill worker": Injection(_kill_client(World.ranks), 3),
    "stop worker": Injection(_stop(lambda world: [c.pid for c in world.ranks()]), 3),
    "kill scheduler": Injection(_kill_client(World.schedulers), 2),
    "stop scheduler": Injection(_stop(lambda world: [c.pid for c in world.schedulers()]), 2),
    "restart with SIGTERM": Injection(_restart(signal.SIGTERM), 1),
    "restart with SIGKILL": Injection(_restart(signal.SIGKILL), 1),
    "starve broker of descriptors": Injection(_starve(_serving_broker), 1.5),
    "starve lane of descriptors": Injection(_starve(_lanes), 1.5),
    "fill pool directory": Injection(_fill_pool_dir, 1.5),
    "jump wall clock": Injection(_jump_clock, 2),
    "pin everything": Injection(_pin_everything, 2),
}
"""Every kind by its name in the report."""
