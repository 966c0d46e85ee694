"""The table of what can be injected. To add a kind: one function, one line in `INJECTIONS`.

A function gets the world and the planned action, does its harm, and returns how to undo it,
which is called after `action.hold` seconds, or raises `Skip` where it cannot be done here.
"""

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.plan import Action
from tests.chaos.processes import CHANGES, Client, Config
from tests.chaos.shared import Count
from tests.chaos.world import JUMPS, World

Undo = Callable[[], None]
Inject = Callable[[World, Action], Undo]


class Skip(Exception):
    """This cannot be injected here; the text says why."""


@dataclass(frozen=True, slots=True)
class Injection:
    """One kind: what does it, and how often it comes relative to the others."""

    inject: Inject
    weight: float


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


def _stop_broker(world: World, action: Action) -> Undo:
    """Engines go on: they load what is there, and store into the slots that they have on loan."""
    pid = action.pick(_broker(world))
    world.freeze(pid)
    before = world.total(Count.LOADS, world.ranks())

    def undo() -> None:
        world.frozen_loads += world.total(Count.LOADS, world.ranks()) - before
        world.thaw(pid)

    return undo


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
    lanes = world.daemon.lane_pids() if world.daemon.running else []
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
            _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            count = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(most, count + more), most))

        def undo() -> None:  # lanes that were started meanwhile have inherited it
            for each in {pid, world.daemon.pid, *world.daemon.lane_pids()}:
                with contextlib.suppress(OSError):
                    _, most = resource.prlimit(each, resource.RLIMIT_NOFILE)
                    resource.prlimit(each, resource.RLIMIT_NOFILE, (most, most))

        return undo

    return inject


def _fill_pool_dir(world: World, action: Action) -> Undo:
    """Not a page is left where the pool and the ledgers lie."""
    del action
    if not world.may_fill:
        raise Skip("this user may not mount a tmpfs, and nobody else's is filled")
    filler = world.pool_dir / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass

    return lambda: filler.unlink(missing_ok=True)


# ----------------------------------------------------------------------- pins


def _pin_everything(world: World, action: Action) -> Undo:
    """Every engine pins what it finds; half of the times it forgets the leases."""
    schedulers = world.schedulers()
    for client in schedulers:
        client.counters[Count.PIN] = 1 + (action.draws[0] < 0.5)

    def undo() -> None:
        for client in schedulers:
            client.counters[Count.PIN] = 0

    return undo


# --------------------------------------------------------------------- clocks


def _jump_clock(world: World, action: Action) -> Undo:
    """Forward or back, by seconds or by decades; then back to where it was."""
    if world.clock.missing:
        raise Skip(world.clock.missing)
    world.clock.jump(action.pick(JUMPS))
    return lambda: world.clock.jump(0)


INJECTIONS: dict[str, Injection] = {
    "kill broker": Injection(_restart(signal.SIGKILL, (None,)), 2),
    "stop broker": Injection(_stop_broker, 3),
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
